//! `generate` with a model that somebody published, from the outside.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{cpu_plugin, golden, json, keep_programs, without_optimizations};
use maxdiff::dtype::DType;
use maxdiff::weights::{Checkpoint, TensorView, save};
use serde_json::Value;

/// `generate` with the recorded SD 2.x pipeline, and `words` after its own.
fn generate(out: &Path, words: &[&str]) -> Output {
    command(out, words).output().unwrap()
}

/// The same, not started yet.
pub fn command(out: &Path, words: &[&str]) -> Command {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base21.yml");
    command_with(&recipe, out, words)
}

fn command_with(recipe: &Path, out: &Path, words: &[&str]) -> Command {
    // Finds the plugin, or says how to install it.
    cpu_plugin();
    let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    without_optimizations(&mut command)
        .arg("generate")
        .arg(recipe)
        .args(words)
        .args(["hardware=cpu", "activations_dtype=float32"])
        .arg(format!("output_dir={}", out.display()))
        .arg(format!(
            "tokenizer_model_name_or_path={}",
            golden("tokenizer").display()
        ))
        .arg(keep_programs())
        // No test asks the hub.
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", out.join("hub"))
        .stdin(Stdio::null());
    let pipeline = golden("pipeline_sd21").display().to_string();
    // The recorded model is too small to be told from SD 1.x.
    for (key, value) in [
        ("pretrained_model_name_or_path=", pipeline.as_str()),
        ("model_family=", ""),
    ] {
        if !words.iter().any(|word| word.starts_with(key)) {
            command.arg(format!("{key}{value}"));
        }
    }
    command
}

/// The error of a call that must end with `code`.
fn error(code: i32, words: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let output = generate(dir.path(), words);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {error}");
    error
}

fn pixels(path: &Value) -> image::RgbImage {
    image::open(path.as_str().unwrap()).unwrap().to_rgb8()
}

/// Whether two images differ by rounding alone.
fn are_near(a: &image::RgbImage, b: &image::RgbImage) -> bool {
    let mut pairs = a.as_raw().iter().zip(b.as_raw());
    a.dimensions() == b.dimensions() && pairs.all(|(a, b)| a.abs_diff(*b) <= 1)
}

#[test]
fn an_image_is_repeated_from_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(
        &prompts,
        "# two images with settings of their own\n\na red circle --n blurry --d 7 --s 3\n\
         (a blue square:1.3), 绿色 --s 4 --l 2.5\n",
    )
    .unwrap();
    let prompts = format!("prompts_file={}", prompts.display());
    let size = ["height=16", "width=24"];
    let words = [&size[..], &[&prompts, "scheduler=unipc", "--json"]].concat();
    let drawn = json(&generate(dir.path(), &words));
    assert_eq!(drawn["images"][0]["seed"], 7);
    assert_eq!(drawn["unet_runs"], 7);
    assert!(drawn["peak_host_bytes"].as_u64() > Some(1 << 20));
    assert!(drawn["seconds"]["denoise"].as_f64() > Some(0.0));
    let second = &drawn["images"][1];
    let image = pixels(&second["path"]);
    assert_eq!(image.dimensions(), (24, 16));

    let path = second["path"].as_str().unwrap();
    let words = ["--from-image", path, "--json"];
    let again = json(&generate(dir.path(), &words));
    let again = &again["images"][0];
    assert_eq!(again["prompt"], "(a blue square:1.3), 绿色");
    assert_ne!(again["path"], second["path"], "nothing is overwritten");
    assert_eq!(pixels(&again["path"]), image);
}

#[test]
fn previews_lie_beside_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let words = [
        "prompt=a cat",
        "height=16",
        "width=16",
        "num_inference_steps=5",
        "scheduler=ddim",
        "--json",
    ];
    let plain = json(&generate(dir.path(), &words));
    let tiny = golden("vae_tiny").display().to_string();
    let tiny = format!("preview_vae_model_name_or_path={tiny}");
    let more = ["preview_steps=2", "guidance_in_two_passes=True", &tiny];
    let shown = json(&generate(dir.path(), &[&words[..], &more].concat()));
    let path = |report: &Value| PathBuf::from(report["images"][0]["path"].as_str().unwrap());
    let folder = path(&shown).parent().unwrap().to_path_buf();
    let names = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    // After 2 and 4 of 5 steps; the image itself is under the next number of its own.
    let expected = [
        "image-00001.png",
        "image-00002.png",
        "preview-00001.png",
        "preview-00002.png",
    ];
    assert_eq!(names, expected);
    let [plain, shown] = [plain, shown].map(|report| pixels(&report["images"][0]["path"]));
    assert!(are_near(&plain, &shown));
}

#[test]
fn a_textual_inversion_changes_no_program_and_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = golden("textual_inversion").join(name);
        path.display().to_string()
    };
    let cat = file("cat.safetensors");
    let one = format!("{{path: '{}', token: sks}}", file("one.safetensors"));
    let size = ["height=16", "width=16", "num_inference_steps=2", "--json"];
    let draw = |words: &[&str]| {
        let output = generate(dir.path(), &[words, &size].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (json(&output), told)
    };
    let (plain, _) = draw(&["prompt=a <cat>"]);
    let both = format!("textual_inversions=['{cat}', {one}]");
    let (drawn, told) = draw(&["prompt=a (<CAT>:1.2)", &both]);
    let warning = "warning: no prompt has sks, the token of the textual inversion ";
    assert!(
        told.contains(warning) && !told.contains("no prompt has <cat>"),
        "{told}"
    );
    assert_eq!(drawn["programs_compiled"], 0);
    let path = &drawn["images"][0]["path"];
    assert_ne!(pixels(path), pixels(&plain["images"][0]["path"]));
    let words = ["--from-image", path.as_str().unwrap(), "--json"];
    let again = json(&generate(dir.path(), &words));
    assert_eq!(pixels(&again["images"][0]["path"]), pixels(path));
}

/// The recorded pipeline's own autoencoder, by the path of its model, is the same;
/// another one makes other images of the same latents.
#[test]
fn images_are_decoded_by_another_autoencoder() {
    let dir = tempfile::tempdir().unwrap();
    let draw = |vae: &Path| {
        let vae = format!("vae_model_name_or_path={}", vae.display());
        let size = ["prompt=x", "height=16", "width=16", "num_inference_steps=2"];
        let words = [&size[..], &["--json", &vae]].concat();
        pixels(&json(&generate(dir.path(), &words))["images"][0]["path"])
    };
    let own = draw(Path::new(""));
    assert_eq!(draw(&golden("pipeline_sd21")), own);
    let tiny = draw(&golden("vae_tiny"));
    assert_eq!(tiny.dimensions(), own.dimensions());
    assert_ne!(tiny, own);
}

#[test]
fn bad_input_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let size = ["prompt=x", "height=16", "width=16"];
    let with = |words: &[&str]| error(2, &[&size[..], words].concat());

    let found = error(2, &["prompt=x", "height=15"]);
    assert!(
        found.contains("height=15 is not a multiple of 2"),
        "{found}"
    );
    assert!(found.contains("nearest: 14 and 16"), "{found}");
    let found = with(&["scheduler=dpm adaptive"]);
    assert!(found.contains("valid: ddim, ddpm, pndm"), "{found}");
    let found = with(&[
        "scheduler=plms",
        "diffusion_scheduler_config.skip_prk_steps=False",
    ]);
    assert!(
        found.contains("skip_prk_steps = false is not supported"),
        "{found}"
    );
    let broken = format!("image={}", file("broken.png", b"no image"));
    let found = with(&[&broken, "strength=1.5"]);
    assert!(found.contains("strength: 1.5 is out of range"), "{found}");
    let found = with(&[&broken]);
    assert!(found.contains("not an image that can be read"), "{found}");
    let found = with(&["strength=0.5"]);
    assert!(found.contains("strength: has no effect"), "{found}");
    let cut = dir.path().join("cut.png");
    image::RgbImage::new(16, 16).save(&cut).unwrap();
    let bytes = std::fs::read(&cut).unwrap();
    let cut = format!("image={}", file("cut.png", &bytes[..bytes.len() - 20]));
    let found = with(&[&cut]);
    assert!(found.contains("or a damaged one"), "{found}");
    let found = error(2, &["--from-image", cut.trim_start_matches("image=")]);
    assert!(found.contains("damaged or cut off?"), "{found}");
    let found = error(2, &["--from-image", "/nowhere.png"]);
    assert!(
        found.contains("cannot open /nowhere.png: No such"),
        "{found}"
    );
    let vae = |path: &Path| with(&[&format!("vae_model_name_or_path={}", path.display())]);
    let found = vae(&golden("vae_shift"));
    let expected = "its latents have 6 channels; expected 4, those of the UNet's samples";
    assert!(found.contains(expected), "{found}");
    let found = vae(&golden("vae_tiny/diffusion_pytorch_model.safetensors"));
    assert!(
        found.contains("this is no autoencoder of the original code"),
        "{found}"
    );
    let found = vae(&golden("vae_sd/diffusion_pytorch_model.safetensors"));
    assert!(
        found.contains("name its folder, which has a config.json"),
        "{found}"
    );
    let found = vae(&golden("unet_sd15"));
    assert!(
        found.contains("_class_name = UNet2DConditionModel is not supported"),
        "{found}"
    );
    let inversion = |value: &str| with(&[&format!("textual_inversions={value}")]);
    let of_golden = |name: &str| {
        let path = golden("textual_inversion").join(name);
        path.display().to_string()
    };
    let found = inversion("/nowhere.pt");
    assert!(
        found.contains("textual_inversions: /nowhere.pt: a PyTorch pickle"),
        "{found}"
    );
    assert!(found.contains("emb_params"), "{found}");
    let found = inversion("/nowhere.safetensors");
    assert!(
        found.contains("/nowhere.safetensors: No such file"),
        "{found}"
    );
    let found = inversion(&of_golden("xl.safetensors"));
    let expected =
        "expected one tensor, vectors for the model's text_encoder; found clip_g, clip_l";
    assert!(found.contains(expected), "{found}");
    let found = inversion(&of_golden("io.safetensors"));
    assert!(
        found.contains("io.safetensors: not a textual inversion: expected one tensor"),
        "{found}"
    );
    let cat = of_golden("cat.safetensors");
    let found = inversion(&format!("['{cat}', '{cat}']"));
    assert!(
        found.contains("the vocabulary has the token <cat>: choose another"),
        "{found}"
    );
    let found = inversion(&format!("{{path: '{cat}', tokn: x}}"));
    assert!(
        found.contains("textual_inversions.tokn: no such key; did you mean token?"),
        "{found}"
    );
    let found = with(&["scheduler=eulr"]);
    assert!(found.contains("did you mean euler?"), "{found}");
    let found = with(&["(word:heavy)", "prompt=(word:1.2.3)"]);
    assert!(found.contains("key=value"), "{found}");
    let found = with(&["controlnet_image=x.png"]);
    assert!(found.contains("controlnet_image: has no effect"), "{found}");
    let found = with(&["use_controlnet=True", "controlnet_image=x.png"]);
    assert!(
        found.contains("controlnet_image=x.png: No such file"),
        "{found}"
    );
    let image = broken.replace("image=", "controlnet_image=");
    let control = ["use_controlnet=True", &image];
    let nowhere = "controlnet_model_name_or_path=./nowhere";
    let found = with(&[&control[..], &[nowhere]].concat());
    assert!(found.contains("name the folder of a ControlNet"), "{found}");
    let found = error(1, &[&size[..], &control].concat());
    let missing = "diffusers/controlnet-canny-sdxl-1.0 at main is not complete in the cache";
    assert!(found.contains(missing), "{found}");
    let prompts = format!("prompts_file={}", file("prompts.txt", b"a cat --w 99\n"));
    let found = error(2, &[&prompts, "height=16", "width=16"]);
    assert!(found.contains("--w 99"), "{found}");
    let lines = error(2, &["prompts_file=/nowhere.txt", "height=16", "width=16"]);
    assert!(lines.contains("/nowhere.txt"), "{lines}");
    let found = with(&[&prompts]);
    assert!(
        found.contains("prompt has no effect with prompts_file"),
        "{found}"
    );

    let folder = format!("pretrained_model_name_or_path={}", dir.path().display());
    let found = error(1, &["prompt=x", &folder]);
    assert!(!found.contains("warning"), "{found}");
    assert!(found.contains("no model in this folder"), "{found}");
    assert!(found.contains("broken.png"), "{found}");
    let other = golden("pipeline_sdxl");
    let other = format!("pretrained_model_name_or_path={}", other.display());
    let found = error(2, &["prompt=x", &other, "model_family=sd2"]);
    let expected = "this is SDXL; base21.yml expects Stable Diffusion 2.x; use sdxl";
    assert!(found.contains(expected), "{found}");
}

/// What a sampler does not read is refused, whether the configuration names the sampler or the model does.
#[test]
fn samplers_refuse_what_they_do_not_read() {
    let with = |words: &[&str]| error(2, &[&["prompt=x", "height=16", "width=16"], words].concat());
    for key in [
        "diffusion_scheduler_config.use_karras_sigmas=True",
        "diffusion_scheduler_config.use_exponential_sigmas=True",
        "diffusion_scheduler_config.use_beta_sigmas=True",
    ] {
        let name = key.rsplit_once('.').unwrap().1.trim_end_matches("=True");
        let found = with(&["scheduler=ddim", key]);
        let expected = format!("{name}: has no effect: it needs scheduler=euler, heun,");
        assert!(found.contains(&expected), "{found}");
        // The recorded model's own sampler is DDIM.
        let found = with(&[key]);
        let expected = format!("{name} has no effect: the model's own sampler, DDIMScheduler,");
        assert!(found.contains(&expected), "{found}");
        assert!(found.contains("one of euler, heun,"), "{found}");
        assert!(!found.contains("warning"), "{found}");
    }
    let found = with(&["scheduler=euler", "eta=0.5"]);
    assert!(
        found.contains("eta: has no effect: it needs scheduler=ddim or tcd"),
        "{found}"
    );
    let found = with(&[
        "scheduler=euler",
        "diffusion_scheduler_config.solver_order=3",
    ]);
    assert!(found.contains("solver_order: has no effect"), "{found}");
    let found = with(&["diffusion_scheduler_config.solver_order=3"]);
    let expected = "diffusion_scheduler_config.solver_order has no effect: the model's own sampler, DDIMScheduler,";
    assert!(found.contains(expected), "{found}");
}

/// The text of an image under a keyword.
fn text_of(path: &Value, keyword: &str) -> String {
    let file = std::io::BufReader::new(std::fs::File::open(path.as_str().unwrap()).unwrap());
    let reader = png::Decoder::new(file).read_info().unwrap();
    let texts = &reader.info().uncompressed_latin1_text;
    let text = texts.iter().find(|text| text.keyword == keyword);
    text.unwrap().text.clone()
}

fn parameters(path: &Value) -> String {
    text_of(path, "parameters")
}

/// An image with the text that web interfaces write.
fn foreign(path: &Path, text: &str) {
    let file = std::fs::File::create(path).unwrap();
    let mut encoder = png::Encoder::new(file, 16, 16);
    encoder
        .add_text_chunk("parameters".to_owned(), text.to_owned())
        .unwrap();
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&[0; 256]).unwrap();
    writer.finish().unwrap();
}

#[test]
fn samplers_have_the_names_of_web_interfaces_and_are_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let karras = "diffusion_scheduler_config.use_karras_sigmas=True";
    let size = ["prompt=a cat", "height=16", "width=16"];
    let words = [
        "scheduler=dpm_multistep",
        karras,
        "num_inference_steps=3",
        "--json",
    ];
    let first = json(&generate(dir.path(), &[&size[..], &words].concat()));
    let first = &first["images"][0]["path"];
    let text = parameters(first);
    let expected = "\nSteps: 3, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, ";
    assert!(text.contains(expected), "{text}");

    // A copy has the settings of the image, so that a copy of it would be the same too.
    let again = |path: &Value, words: &[&str]| {
        let words = [&["--from-image", path.as_str().unwrap(), "--json"], words].concat();
        json(&generate(dir.path(), &words))["images"][0]["path"].clone()
    };
    let second = again(first, &[]);
    assert_eq!(pixels(&second), pixels(first));
    for keyword in ["parameters", "maxdiff"] {
        assert_eq!(text_of(&second, keyword), text_of(first, keyword));
    }
    // What only the image's sampler reads goes with it.
    let other = again(&second, &["scheduler=ddim"]);
    assert!(parameters(&other).contains("Sampler: DDIM, Schedule type: Automatic,"));

    let web = dir.path().join("web.png");
    let line = "CFG scale: 5, Seed: 7, Size: 24x16, Denoising strength: 0.4, Version: v1.10.1";
    foreign(
        &web,
        &format!("a (cat:1.2)\nSteps: 2, Sampler: DPM++ 2M Karras, {line}"),
    );
    let read = ["--from-image", web.to_str().unwrap(), "--json"];
    let output = generate(dir.path(), &read);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("made by another program"), "{told}");
    assert!(told.contains("ignored: Denoising strength: 0.4"), "{told}");
    let linspace = "diffusion_scheduler_config.timestep_spacing=linspace";
    let same = [
        "prompt=a (cat:1.2)",
        "negative_prompt=",
        "height=16",
        "width=24",
        "scheduler=dpm_multistep",
        karras,
        linspace,
        "num_inference_steps=2",
        "guidance_scale=5",
        "seed=7",
        "--json",
    ];
    let same = json(&generate(dir.path(), &same));
    let found = json(&output);
    assert_eq!(
        pixels(&found["images"][0]["path"]),
        pixels(&same["images"][0]["path"])
    );

    foreign(
        &web,
        &format!("a cat\nSteps: 2, Sampler: DPM adaptive, {line}"),
    );
    let found = error(2, &read);
    assert!(
        found.contains("its sampler, DPM adaptive, is not here; give scheduler="),
        "{found}"
    );
}

/// The folder `name` in `dir`, with recorded folders and files under other names.
fn assemble(dir: &Path, name: &str, parts: &[(&str, &str)]) -> String {
    let model = dir.join(name);
    std::fs::create_dir(&model).unwrap();
    for (from, to) in parts {
        let (from, to) = (golden(from), model.join(to));
        if from.is_file() {
            std::fs::copy(from, to).unwrap();
            continue;
        }
        std::fs::create_dir(&to).unwrap();
        for file in std::fs::read_dir(from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    model.display().to_string()
}

/// An image with a gradient, and a mask of its right half in green and white, which are brighter than half. Blue is not.
fn image_and_mask(dir: &Path) -> [String; 2] {
    let image =
        image::RgbImage::from_fn(16, 16, |x, y| image::Rgb([16 * x as u8, 16 * y as u8, 128]));
    let mask = image::RgbImage::from_fn(16, 16, |x, y| match (x < 8, y < 8) {
        (true, _) => image::Rgb([0, 0, 255]),
        (false, true) => image::Rgb([0, 255, 0]),
        (false, false) => image::Rgb([255; 3]),
    });
    [("image", image), ("mask_image", mask)].map(|(key, image)| {
        let path = dir.join(format!("{key}.png"));
        image.save(&path).unwrap();
        format!("{key}={}", path.display())
    })
}

fn joined<'a>(words: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [words, more].concat()
}

const SMALL: [&str; 4] = ["prompt=x", "height=16", "width=16", "num_inference_steps=5"];

/// Every prompt from each image, as calls with one of them draw it.
#[test]
fn several_images_are_drawn_from_one_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let [image, _] = image_and_mask(dir.path());
    let first = image.trim_start_matches("image=");
    let second = dir.path().join("a second.png").display().to_string();
    image::RgbImage::from_pixel(16, 16, image::Rgb([200, 20, 20]))
        .save(&second)
        .unwrap();
    let both = format!("image=['{first}', '{second}']");
    let draw = |words: &[&str]| json(&generate(dir.path(), &[words, &["--json"]].concat()));
    let words = joined(
        &SMALL,
        &["strength=0.4", "num_images_per_prompt=2", "scheduler=ddim"],
    );
    let drawn = draw(&joined(&words, &[&both]));
    let images = drawn["images"].as_array().unwrap();
    let named: Vec<(String, &Value, &Value)> = images
        .iter()
        .map(|image| {
            let path = Path::new(image["path"].as_str().unwrap());
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, &image["image"], &image["seed"])
        })
        .collect();
    let [first, second] = [Value::from(first), Value::from(second.as_str())];
    let [zero, one] = [Value::from(0), Value::from(1)];
    let expected = [
        ("image-image-00001.png".to_owned(), &first, &zero),
        ("image-image-00002.png".to_owned(), &first, &one),
        ("image-a_second-00001.png".to_owned(), &second, &zero),
        ("image-a_second-00002.png".to_owned(), &second, &one),
    ];
    assert_eq!(named, expected);

    let alone = format!("image={}", second.as_str().unwrap());
    let alone = draw(&joined(&words, &[&alone]));
    let of_second = |drawn: &Value, at: usize| pixels(&drawn["images"][at]["path"]);
    assert!(are_near(&of_second(&alone, 1), &of_second(&drawn, 3)));
    assert_ne!(of_second(&drawn, 1), of_second(&drawn, 3));
    // An image repeats what was drawn from its own input.
    let again = draw(&["--from-image", images[2]["path"].as_str().unwrap()]);
    assert_eq!(again["images"].as_array().unwrap()[0]["image"], second);
    assert!(are_near(&of_second(&again, 0), &of_second(&drawn, 2)));

    let found = error(2, &joined(&SMALL, &["image=['x.png', '']"]));
    assert!(found.contains("one of the images has no name"), "{found}");
    let found = error(2, &joined(&SMALL, &["image=['x.png', 'y.png']"]));
    assert!(found.contains("image=x.png: No such file"), "{found}");
}

#[test]
fn an_inpainting_model_needs_an_image_and_a_mask() {
    let dir = tempfile::tempdir().unwrap();
    let model = assemble(
        dir.path(),
        "inpainting",
        &[
            ("pipeline_sd15/model_index.json", "model_index.json"),
            ("pipeline_sd15/scheduler", "scheduler"),
            ("pipeline_sd15/text_encoder", "text_encoder"),
            ("pipeline_sd15/unet_inpainting", "unet"),
            ("pipeline_sd15/vae", "vae"),
        ],
    );
    let pretrained = format!("pretrained_model_name_or_path={model}");
    let [image, mask] = image_and_mask(dir.path());
    let words = [&SMALL[..], &[&pretrained]].concat();
    let found = error(2, &words);
    assert!(found.contains("an inpainting model"), "{found}");
    assert!(found.contains("nine channels"), "{found}");
    let found = error(2, &[&words[..], &[&image]].concat());
    assert!(found.contains("mask_image=''"), "{found}");

    let words = [
        &words[..],
        &[&image, &mask, "strength=1", "scheduler=ddim", "--json"],
    ]
    .concat();
    let drawn = json(&generate(dir.path(), &words));
    assert_eq!(drawn["unet_runs"], 5);
    let drawn = &drawn["images"][0]["path"];
    let path = drawn.as_str().unwrap();
    let again = [&pretrained, "--from-image", path, "--json"];
    let again = json(&generate(dir.path(), &again));
    assert_eq!(again["unet_runs"], 5);
    assert_eq!(pixels(&again["images"][0]["path"]), pixels(drawn));
}

#[test]
fn what_is_wrong_with_a_model_is_named_with_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let parts = [
        "model_index.json",
        "scheduler",
        "text_encoder",
        "unet",
        "vae",
    ];
    let from = parts.map(|part| format!("pipeline_sd21/{part}"));
    let parts: Vec<(&str, &str)> = from.iter().map(String::as_str).zip(parts).collect();
    let model = assemble(dir.path(), "model", &parts);
    let own = format!("pretrained_model_name_or_path={model}");
    let words = ["prompt=x", "height=16", "width=16", &own];
    for (file, field, value, expected) in [
        (
            "unet/config.json",
            "block_out_channels",
            "[0, 8]",
            "UNet2DConditionModel: block_out_channels[0] = 0",
        ),
        (
            "unet/config.json",
            "in_channels",
            "5",
            "UNet2DConditionModel: in_channels = 5 is not supported",
        ),
        (
            "vae/config.json",
            "_class_name",
            "\"AutoencoderDC\"",
            "AutoencoderKL: _class_name = AutoencoderDC",
        ),
        (
            "text_encoder/config.json",
            "architectures",
            "[\"T5EncoderModel\"]",
            "CLIPTextModel: architectures = [\"T5EncoderModel\"]",
        ),
        (
            "scheduler/scheduler_config.json",
            "beta_schedule",
            "\"flat\"",
            "scheduler: beta_schedule = \"flat\"",
        ),
    ] {
        let path = Path::new(&model).join(file);
        let before = std::fs::read_to_string(&path).unwrap();
        let mut config: Value = serde_json::from_str(&before).unwrap();
        config[field] = serde_json::from_str(value).unwrap();
        std::fs::write(&path, config.to_string()).unwrap();
        let found = error(2, &words);
        let expected = format!("{}: ", path.display()) + expected;
        assert!(found.contains(&expected), "{expected}: {found}");
        std::fs::write(&path, before).unwrap();
    }
    let two = [&words[..], &["unet_config={block_out_channels: [8]}"]].concat();
    let found = error(2, &two);
    let expected = format!("unet_config has no effect: {model} has a UNet of its own");
    assert!(found.contains(&expected), "{found}");

    // What `config check` says of it, which opens a model that is here.
    std::fs::remove_dir_all(Path::new(&model).join("scheduler")).unwrap();
    let mut check = command(dir.path(), &words);
    let given: Vec<std::ffi::OsString> = check.get_args().skip(1).map(Into::into).collect();
    check = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
    check.args(["config", "check"]).args(given);
    check.args(["--verb", "generate"]);
    let output = check.output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{told}");
    let expected = "scheduler/scheduler_config.json: the noise schedule and the sampler, ddim, are the recipe's";
    assert!(told.contains(expected), "{told}");
}

/// What a recipe of MaxDiffusion draws with a recorded model.
fn draw_with(recipe: &Path, out: &Path, words: &[&str]) -> image::RgbImage {
    let words = [words, &["--json"]].concat();
    let drawn = json(&command_with(recipe, out, &words).output().unwrap());
    pixels(&drawn["images"][0]["path"])
}

#[test]
fn distilled_weights_replace_the_denoisers() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    // As MaxDiffusion's recipe of SDXL-Lightning has it.
    let recipe = at("lightning.yml");
    let text = "model_family: sdxl\nprompt: x\nresolution: 16\nnum_inference_steps: 2\n\
        do_classifier_free_guidance: False\nguidance_scale: 2.0\nguidance_rescale: -1\nlightning_from_pt: True\n\
        diffusion_scheduler_config: {_class_name: DDIMScheduler, prediction_type: epsilon, timestep_spacing: trailing}\n";
    std::fs::write(&recipe, text).unwrap();
    let base = golden("pipeline_sdxl");
    let base = format!("pretrained_model_name_or_path={}", base.display());
    let draw = |words: &[&str]| draw_with(&recipe, dir.path(), words);

    // Other weights: half of them are 0.
    let weights = "unet/diffusion_pytorch_model.safetensors";
    let mut bytes = std::fs::read(golden("pipeline_sdxl").join(weights)).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].fill(0);
    std::fs::write(at("distilled.safetensors"), &bytes).unwrap();
    let here = format!("lightning_repo={}", dir.path().display());
    let distilled = draw(&[&base, &here, "lightning_ckpt=distilled.safetensors"]);

    let layer = "time_embedding.linear_1";
    let unet = Checkpoint::open(&golden("pipeline_sdxl/unet")).unwrap();
    let dims = &unet.info(&format!("{layer}.weight")).unwrap().dims;
    let factors = [("lora_A", [1, dims[1]]), ("lora_B", [dims[0], 1])];
    let factors = factors.map(|(factor, dims)| {
        let ones = 1f32.to_le_bytes().repeat(dims[0] * dims[1]);
        (format!("unet.{layer}.{factor}.weight"), dims, ones)
    });
    let views = factors.iter().map(|(name, dims, data)| TensorView {
        name,
        dtype: DType::F32,
        dims,
        data,
    });
    save(&at("lora.safetensors"), views, &Default::default()).unwrap();
    let vae = golden("pipeline_sdxl/vae/diffusion_pytorch_model.safetensors");
    std::fs::copy(vae, at("vae.safetensors")).unwrap();
    let with_lora = draw(&[&base, &here, "lightning_ckpt=lora.safetensors"]);
    assert_ne!(with_lora, distilled);

    for (code, words, expected) in [
        (
            2,
            vec![here.as_str()],
            "lightning_repo needs lightning_ckpt",
        ),
        (
            2,
            vec!["lightning_ckpt=x"],
            "lightning_ckpt: has no effect: it needs lightning_repo",
        ),
        (
            2,
            vec![&here, "lightning_ckpt=nowhere.safetensors"],
            "nowhere.safetensors: No such file",
        ),
        (
            1,
            vec![&here, "lightning_ckpt=vae.safetensors"],
            "this is the VAE of a diffusers folder",
        ),
    ] {
        let output = command_with(
            &recipe,
            dir.path(),
            &[&[base.as_str()], &words[..]].concat(),
        )
        .output();
        let output = output.unwrap();
        let found = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{found}");
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn a_whole_recipe_of_maxdiffusion_draws() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/base15_full.yml");
    let model = format!(
        "pretrained_model_name_or_path={}",
        golden("pipeline_sd15").display()
    );
    // A small model has its own groups, and trains nothing.
    let words = [
        &model,
        "resolution=16",
        "num_inference_steps=4",
        "norm_num_groups=",
        "revision=main",
    ];
    let image = draw_with(&recipe, dir.path(), &words);
    assert_eq!(image.dimensions(), (16, 16));
}

#[test]
fn an_ip_adapter_shows_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let [image, _] = image_and_mask(dir.path());
    let image = image.replace("image=", "ip_adapter_image=");
    let model = format!(
        "pretrained_model_name_or_path={}",
        golden("pipeline_sd15").display()
    );
    let file = |name: &str| {
        format!(
            "ip_adapter_path={}",
            golden("ip_adapter").join(name).display()
        )
    };
    let plus = file("sd15_plus.safetensors");
    let words = [&SMALL[..], &[&model, "scheduler=ddim"]].concat();
    let draw = |words: &[&str]| {
        let drawn = json(&generate(dir.path(), &[words, &["--json"]].concat()));
        let path = drawn["images"][0]["path"].as_str().unwrap().to_owned();
        (image::open(&path).unwrap().to_rgb8(), path)
    };
    let (seen, path) = draw(&joined(&words, &[&plus, &image]));
    let repeat = ["--from-image", &path, &model];
    let (again, _) = draw(&repeat);
    assert_eq!(again, seen);
    let (less, _) = draw(&joined(&repeat, &["ip_adapter_scale=0"]));
    assert_ne!(less, seen);

    let pickle = "ip_adapter_path=ip-adapter_sd15.bin";
    let other = file("sdxl.safetensors");
    let encoder = format!("ip_adapter_image_encoder={}", dir.path().display());
    for (more, expected) in [
        (vec![&plus], "an IP-Adapter needs ip_adapter_image=FILE"),
        (vec![&image], "ip_adapter_image: has no effect"),
        (
            vec![&image, &pickle.to_owned()],
            "a pickle, which can run code",
        ),
        (
            vec![&image, &plus, &encoder],
            "name the folder with ip_adapter_image_encoder",
        ),
        (
            vec![&image, &other],
            "sdxl.safetensors: IP-Adapter: image_proj.norm.weight: expected [16], the UNet's cross_attention_dim",
        ),
    ] {
        let more: Vec<&str> = more.into_iter().map(String::as_str).collect();
        let found = error(2, &joined(&words, &more));
        assert!(found.contains(expected), "{more:?}: {found}");
    }

    // An adapter of a UNet with fewer layers: the file, the tensor, what was expected and found.
    let adapter = Checkpoint::open(&golden("ip_adapter/sd15.safetensors")).unwrap();
    let cut: Vec<(String, maxdiff::host_tensor::HostTensor)> = adapter
        .names()
        .filter(|name| !name.contains(".7."))
        .map(|name| (name.to_owned(), adapter.read(name).unwrap()))
        .collect();
    let views = cut.iter().map(|(name, tensor)| TensorView {
        name,
        dtype: tensor.shape.dtype,
        dims: &tensor.shape.dims,
        data: &tensor.data,
    });
    let path = dir.path().join("cut.safetensors");
    save(&path, views, &Default::default()).unwrap();
    let cut = format!("ip_adapter_path={}", path.display());
    let encoder = format!(
        "ip_adapter_image_encoder={}",
        golden("ip_adapter/image_encoder").display()
    );
    let found = error(1, &joined(&words, &[&image, &cut, &encoder]));
    assert!(found.contains("cut.safetensors"), "{found}");
    assert!(found.contains("ip_adapter.7.to_k_ip.weight"), "{found}");
}

#[test]
fn a_hires_fix_draws_twice() {
    let dir = tempfile::tempdir().unwrap();
    let draw = |words: &[&str]| json(&generate(dir.path(), &[words, &["--json"]].concat()));
    let image_of = |drawn: &Value| pixels(&drawn["images"][0]["path"]);
    let words = joined(
        &SMALL,
        &["hires_scale=1.5", "hires_strength=0.5", "hires_steps=8"],
    );
    let large = draw(&words);
    assert_eq!(large["unet_runs"], 5 + 4);
    assert_eq!(image_of(&large).dimensions(), (24, 24));
    let path = &large["images"][0]["path"];
    let text = parameters(path);
    assert!(text.contains("Size: 16x16, "), "{text}");
    let expected =
        "Denoising strength: 0.5, Hires upscale: 1.5, Hires steps: 4, Hires upscaler: Latent, ";
    assert!(text.contains(expected), "{text}");

    let from = ["--from-image", path.as_str().unwrap()];
    let again = draw(&from);
    assert_eq!(image_of(&again), image_of(&large));
    let small = draw(&joined(&from, &["hires_scale="]));
    assert_eq!(image_of(&small).dimensions(), (16, 16));

    let [image, _] = image_and_mask(dir.path());
    for (more, expected) in [
        (
            vec!["hires_steps=3"],
            "hires_steps: has no effect: it needs hires_scale",
        ),
        (
            vec!["hires_scale=1"],
            "hires_scale: 1.0 is out of range: expected more than 1",
        ),
        (
            vec!["hires_scale=1.1"],
            "leaves images of height=16 width=16 at their size",
        ),
        (
            vec!["hires_scale=2", "hires_strength=0"],
            "leaves none of 5 steps",
        ),
        (
            vec!["hires_scale=2", &image],
            "give the larger height and width",
        ),
        (
            vec!["hires_scale=2", "refiner_model_name_or_path=x"],
            "does not work with a refiner",
        ),
    ] {
        let found = error(2, &joined(&SMALL, &more));
        assert!(found.contains(expected), "{more:?}: {found}");
    }
}

#[test]
fn a_refiner_takes_the_last_steps() {
    let dir = tempfile::tempdir().unwrap();
    let refiner = assemble(
        dir.path(),
        "refiner",
        &[
            ("pipeline_refiner/model_index.json", "model_index.json"),
            ("pipeline_refiner/scheduler", "scheduler"),
            ("pipeline_refiner/unet", "unet"),
            ("pipeline_sdxl/text_encoder_2", "text_encoder_2"),
            ("pipeline_sdxl/vae", "vae"),
        ],
    );
    let base = golden("pipeline_sdxl").display().to_string();
    let pretrained = format!("pretrained_model_name_or_path={base}");
    let second = format!("refiner_model_name_or_path={refiner}");
    let own_words = [&SMALL[..], &[&pretrained]].concat();
    let draw = |words: &[&str]| json(&generate(dir.path(), &[words, &["--json"]].concat()));
    let image_of = |drawn: &Value| pixels(&drawn["images"][0]["path"]);

    let settings = [&second, "denoising_end=0.6", "aesthetic_score=7"];
    let refined = draw(&joined(&own_words, &settings));
    assert_eq!(refined["unet_runs"], 5);
    assert_eq!(refined["refiner"], refiner.as_str());
    let path = refined["images"][0]["path"].as_str().unwrap();
    let again = draw(&[&pretrained, "--from-image", path]);
    assert_eq!(again["refiner"], refiner.as_str());
    assert_eq!(image_of(&again), image_of(&refined));
    let liked = draw(&[&pretrained, "--from-image", path, "aesthetic_score=2"]);
    assert_ne!(image_of(&liked), image_of(&refined));
    // Steps that both take, and steps that neither does.
    let twice = draw(&joined(
        &own_words,
        &[&second, "denoising_end=0.6", "denoising_start=0.2"],
    ));
    assert_eq!(twice["unet_runs"], 7);

    // Alone, from an image.
    let [image, mask] = image_and_mask(dir.path());
    let own = format!("pretrained_model_name_or_path={refiner}");
    let words = [&SMALL[..], &[&own]].concat();
    let found = error(2, &words);
    assert!(found.contains("starts from an image"), "{found}");
    let drawn = draw(&[&words[..], &[&image, "strength=0.4"]].concat());
    assert_eq!(drawn["unet_runs"], 2);

    for (words, expected) in [
        (
            joined(&own_words, &["denoising_end=0.5"]),
            "denoising_end: has no effect",
        ),
        (
            joined(&own_words, &["aesthetic_score=5"]),
            "aesthetic_score has no effect",
        ),
        (
            joined(&own_words, &[&second, &image, &mask]),
            "a refiner does not see the mask",
        ),
        (
            joined(&own_words, &[&second, "denoising_end=0"]),
            "leaves none of 5 steps",
        ),
        (
            joined(&own_words, &[&second, "denoising_start=1"]),
            "leaves none of 5 steps",
        ),
        (
            joined(&own_words, &["refiner_model_name_or_path=/nowhere"]),
            "no such file or folder",
        ),
    ] {
        let found = error(2, &words);
        assert!(found.contains(expected), "{words:?}: {found}");
    }
    let other = format!(
        "refiner_model_name_or_path={}",
        golden("pipeline_sd15").display()
    );
    let found = error(2, &joined(&own_words, &[&other]));
    assert!(found.contains("expected the SDXL refiner"), "{found}");
    let found = error(2, &[&SMALL[..], &[&second]].concat());
    assert!(found.contains("which has no refiner"), "{found}");
}

#[test]
fn several_controlnets_have_settings_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let pretrained = format!(
        "pretrained_model_name_or_path={}",
        golden("pipeline_sd15").display()
    );
    let [image, _] = image_and_mask(dir.path());
    let image = image.replace("image=", "controlnet_image=");
    let nets = ["controlnet", "controlnet_1"]
        .map(|name| golden("pipeline_sd15").join(name).display().to_string());
    let nets = format!(
        "controlnet_model_name_or_path=['{}', '{}']",
        nets[0], nets[1]
    );
    let own_words = [
        &SMALL[..],
        &[&pretrained, "use_controlnet=True", &nets, &image],
    ]
    .concat();
    let draw = |words: &[&str]| json(&generate(dir.path(), &[words, &["--json"]].concat()));

    let both = draw(&joined(
        &own_words,
        &[
            "controlnet_conditioning_scale=[1, 0.5]",
            "controlnet_canny=[False, True]",
        ],
    ));
    let path = both["images"][0]["path"].as_str().unwrap();
    let again = draw(&[&pretrained, "--from-image", path]);
    let [image, repeated] = [&both, &again].map(|drawn| pixels(&drawn["images"][0]["path"]));
    assert_eq!(repeated, image);
    let other = draw(&[
        &pretrained,
        "--from-image",
        path,
        "controlnet_conditioning_scale=[1, 4]",
    ]);
    assert_ne!(pixels(&other["images"][0]["path"]), image);

    for (word, expected) in [
        (
            "controlnet_conditioning_scale=[1, 0.5, 2]",
            "controlnet_conditioning_scale has 3 entries for 2 ControlNets",
        ),
        (
            "controlnet_conditioning_scale=[1, 20]",
            "20.0 is out of range",
        ),
        ("control_guidance_end=[0.5, 0]", "never act"),
        ("controlnet_image=[]", "string or list of such"),
    ] {
        let found = error(2, &joined(&own_words, &[word]));
        assert!(found.contains(expected), "{word}: {found}");
    }
}

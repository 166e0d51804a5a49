//! `generate` with a model that somebody published, from the outside.

mod models;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{cpu_plugin, golden, json, keep_programs, without_optimizations};
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
    let expected = "its latents have 6 channels; expected 4, those of the denoiser's samples";
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

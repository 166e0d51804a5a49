//! `generate` with models of several kinds: from images, for inpainting, distilled, refined, steered.

use std::path::Path;
use std::process::Command;

use crate::common::{golden, json};
use maxdiff::dtype::DType;
use maxdiff::weights::{Checkpoint, TensorView, save};
use serde_json::Value;

use super::{are_near, command, command_with, error, generate, parameters, pixels};

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
    assert!(
        found.contains("its unet takes mask and masked image"),
        "{found}"
    );
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
    let long = dir.path().join("long.png");
    image::RgbImage::new(1, 16).save(&long).unwrap();
    let long = format!("ip_adapter_image={}", long.display());
    for (more, expected) in [
        (
            vec![&plus, &long],
            "long.png: 1 x 16 pixels; expected sides of less than 1 to 16",
        ),
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

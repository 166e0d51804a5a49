//! Fine-tuning from the outside: one command from pictures to a model, or to low-rank updates of one.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use crate::common::{RecordedPipeline, golden, keep_programs, text, without_optimizations};
use crate::datasets::shapes_dataset::example;
use maxdiff::dtype::DType;
use maxdiff::metrics::read_json_lines;
use maxdiff::util::tfrecord::write_record;
use maxdiff::weights::Checkpoint;
use maxdiff::weights::lora::{LoraFile, LoraScale, LoraTarget};

/// A recorded model with tokenizers, and six captioned pictures.
pub struct Place {
    dir: tempfile::TempDir,
    recipe: &'static str,
}

impl Place {
    pub fn new(case: &'static str) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        copy(&golden(&format!("pipeline_{case}")), &model);
        copy(
            &golden(&format!("finetune/{case}/unet")),
            &model.join("unet"),
        );
        for (name, pad) in [("tokenizer", "<|endoftext|>"), ("tokenizer_2", "!")] {
            let folder = model.join(name);
            copy(&golden("tokenizer"), &folder);
            let config = serde_json::json!({
                "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad,
            });
            fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
        }
        let recipe = match case {
            "sdxl" => "sdxl",
            _ => "sd15",
        };
        Place::with_pictures(dir, recipe)
    }

    /// The same for a recorded model with a transformer.
    pub fn of_transformer(pipeline: &RecordedPipeline) -> Place {
        let dir = tempfile::tempdir().unwrap();
        copy(pipeline.folder().path(), &dir.path().join("model"));
        Place::with_pictures(dir, pipeline.recipe)
    }

    fn with_pictures(dir: tempfile::TempDir, recipe: &'static str) -> Place {
        let data = dir.path().join("data");
        fs::create_dir(&data).unwrap();
        for at in 0..6u8 {
            let picture = image::RgbImage::from_fn(20, 16, |x, y| {
                image::Rgb([x as u8 * 12, y as u8 * 15, at * 40])
            });
            picture.save(data.join(format!("{at}.png"))).unwrap();
            fs::write(data.join(format!("{at}.txt")), format!("a picture of {at}")).unwrap();
        }
        let place = Place { dir, recipe };
        place.settle("data");
        place.settle("model");
        place
    }

    /// Files as they would be an hour later: what was written just now may change again within one tick of the clock.
    fn settle(&self, name: &str) {
        let path = self.path(name);
        if path.is_dir() {
            for entry in fs::read_dir(&path).unwrap() {
                let entry = entry.unwrap().file_name();
                self.settle(&format!("{name}/{}", entry.to_str().unwrap()));
            }
        } else {
            let hour = std::time::Duration::from_secs(3600);
            let written = self.modified(name);
            self.set_modified(name, written - hour);
        }
    }

    /// Adds a picture with the text of its caption file.
    pub fn add_picture(&self, name: &str, width: u32, height: u32, text: &str) {
        let picture = image::RgbImage::from_fn(width, height, |x, y| {
            image::Rgb([x as u8 * 3, y as u8 * 5, 99])
        });
        let data = self.path("data");
        picture.save(data.join(format!("{name}.png"))).unwrap();
        fs::write(data.join(format!("{name}.txt")), text).unwrap();
    }

    /// Writes a mask for each picture, with the value of each column.
    pub fn add_masks(&self, value: fn(u32) -> u8) {
        fs::create_dir_all(self.path("masks")).unwrap();
        for entry in fs::read_dir(self.path("data")).unwrap() {
            let name = entry.unwrap().file_name();
            let name = Path::new(&name);
            if name.extension().is_some_and(|extension| extension == "png") {
                let picture = self.path("data").join(name);
                let (width, height) = image::image_dimensions(picture).unwrap();
                let mask = image::GrayImage::from_fn(width, height, |x, _| image::Luma([value(x)]));
                mask.save(self.path("masks").join(name)).unwrap();
            }
        }
    }

    /// The words that say where the masks are.
    pub fn masks(&self) -> [String; 2] {
        let folder = self.path("masks");
        let folder = format!("conditioning_data_dir={}", folder.display());
        ["masked_loss=folder".to_owned(), folder]
    }

    /// Makes the pictures transparent at one side.
    pub fn make_transparent(&self) {
        for at in 0..6 {
            let path = self.path("data").join(format!("{at}.png"));
            let mut picture = image::open(&path).unwrap().into_rgba8();
            for (x, _, pixel) in picture.enumerate_pixels_mut() {
                pixel.0[3] = if x < 7 { 30 } else { 255 };
            }
            picture.save(path).unwrap();
        }
        self.settle("data");
    }

    /// Puts the pictures and captions into two archives.
    fn archive(&self) {
        fs::create_dir(self.path("archives")).unwrap();
        for (name, numbers) in [("a", 0..4), ("b", 4..6)] {
            let file = fs::File::create(self.path("archives").join(format!("{name}.tar")));
            let mut builder = tar::Builder::new(file.unwrap());
            for name in numbers.flat_map(|at| [format!("{at}.png"), format!("{at}.txt")]) {
                let path = self.path("data").join(&name);
                builder.append_path_with_name(path, name).unwrap();
            }
            builder.finish().unwrap();
        }
    }

    /// Puts the pictures and captions into a TFRecord file.
    fn record(&self) {
        fs::create_dir(self.path("records")).unwrap();
        let mut bytes = Vec::new();
        for at in 0..6 {
            let data = self.path("data");
            let image = fs::read(data.join(format!("{at}.png"))).unwrap();
            let caption = fs::read_to_string(data.join(format!("{at}.txt"))).unwrap();
            write_record(&mut bytes, &example(&image, &caption)).unwrap();
        }
        fs::write(self.path("records/a.tfrec"), bytes).unwrap();
    }

    fn modified(&self, name: &str) -> SystemTime {
        let metadata = fs::metadata(self.path(name)).unwrap();
        metadata.modified().unwrap()
    }

    fn set_modified(&self, name: &str, time: SystemTime) {
        let file = fs::File::options().write(true).open(self.path(name));
        file.unwrap().set_modified(time).unwrap();
    }

    /// Overwrites the end of files, whose times stay, while `then` runs.
    fn while_spoiled(&self, names: &[String], then: impl FnOnce()) {
        let write = |name: &String, bytes: &[u8]| {
            let time = self.modified(name);
            fs::write(self.path(name), bytes).unwrap();
            self.set_modified(name, time);
        };
        let whole: Vec<Vec<u8>> = names
            .iter()
            .map(|name| fs::read(self.path(name)).unwrap())
            .collect();
        for (name, bytes) in names.iter().zip(&whole) {
            let mut spoiled = bytes.clone();
            let end = spoiled.len() - 16;
            spoiled[end..].fill(7);
            write(name, &spoiled);
        }
        then();
        for (name, bytes) in names.iter().zip(&whole) {
            write(name, bytes);
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn model(&self) -> String {
        format!(
            "pretrained_model_name_or_path={}",
            self.path("model").display()
        )
    }

    /// `verb` with the outputs in the folder `out`.
    pub fn command(&self, verb: &str, out: &str, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"));
        without_optimizations(&mut command)
            .arg(verb)
            .arg(self.recipe)
            .args(words)
            .args(["hardware=cpu", "resolution=16", "num_inference_steps=3"])
            .arg(format!("output_dir={}", self.path(out).display()))
            .arg(keep_programs())
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null());
        for (key, value) in [
            (
                "pretrained_model_name_or_path=",
                self.path("model").display().to_string(),
            ),
            ("activations_dtype=", "float32".to_owned()),
        ] {
            if !words.iter().any(|word| word.starts_with(key)) {
                command.arg(format!("{key}{value}"));
            }
        }
        command
    }

    /// Gives every picture this caption.
    pub fn caption(&self, caption: &str) {
        for at in 0..6 {
            fs::write(self.path("data").join(format!("{at}.txt")), caption).unwrap();
        }
        self.settle("data");
    }

    /// `train` on the pictures; what it writes to standard error.
    pub fn train(&self, out: &str, words: &[&str]) -> String {
        let (code, log) = self.try_train(out, words);
        assert_eq!(code, Some(0), "{words:?}: {log}");
        log
    }

    pub fn try_train(&self, out: &str, words: &[&str]) -> (Option<i32>, String) {
        let output = self.train_command(out, words).output().unwrap();
        (output.status.code(), text(&output.stderr).to_owned())
    }

    /// `train` on the pictures.
    pub fn train_command(&self, out: &str, words: &[&str]) -> Command {
        let others = [
            ("dataset_type=webdataset", "archives"),
            ("dataset_type=tfrecord", "records"),
        ];
        let other = others.iter().find(|(word, _)| words.contains(word));
        let data = self.path(other.map_or("data", |(_, folder)| folder));
        let data = format!("train_data_dir={}", data.display());
        let cache = format!("dataset_save_location={}", self.path("encoded").display());
        let mut own = vec!["learning_rate=1e-2", "log_period=1"];
        let names = |key: &str| words.iter().any(|word| word.starts_with(key));
        if !names("instance_data_dir") {
            if !names("train_data_mix") {
                own.push(data.as_str());
            }
            if other.is_none() {
                own.push("dataset_type=folder");
            }
        }
        let mut command = self.command("train", out, &[&own, words].concat());
        if !words
            .iter()
            .any(|word| word.starts_with("dataset_save_location"))
        {
            command.arg(cache);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn generate(&self, out: &str, words: &[&str]) -> image::RgbImage {
        self.draw(out, "prompt=a picture", words)
    }

    /// `generate` of one prompt.
    pub fn draw(&self, out: &str, prompt: &str, words: &[&str]) -> image::RgbImage {
        let words = [&[prompt, "seed=3"], words].concat();
        let output = self.command("generate", out, &words).output().unwrap();
        let error = text(&output.stderr);
        assert!(output.status.success(), "{words:?}: {error}");
        image::open(text(&output.stdout).trim()).unwrap().to_rgb8()
    }

    pub fn checkpoint(&self, out: &str, step: u64) -> PathBuf {
        self.path(out).join(format!("checkpoints/step-{step:08}"))
    }

    pub fn losses(&self, out: &str) -> Vec<f64> {
        let lines = read_json_lines(&self.path(out).join("metrics.jsonl")).unwrap();
        let lines = lines.lines.iter();
        lines
            .filter_map(|line| line.get("learning/loss")?.as_f64())
            .collect()
    }

    fn shards(&self) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(self.path("encoded")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// SDXL, with dropped captions, mirrored pictures and crops at random: all that is drawn comes from seed and step, also
/// after a pause and with what another run has encoded.
#[test]
fn a_fine_tuned_model_is_a_whole_one_and_its_run_continues_bit_for_bit() {
    let place = Place::new("sdxl");
    let words = |more: &[&'static str]| {
        let own = [
            "caption_dropout=0.3",
            "random_flip=True",
            "center_crop=False",
            "per_device_batch_size=1",
            "gradient_accumulation_steps=2",
            "optimizer_type=Lion",
            "optimizer_state_dtype=bfloat16",
            "noise_offset=0.1",
            "input_perturbation=0.1",
            "learning_rate_schedule_steps=4",
        ];
        [&own, more].concat()
    };
    let log = place.train("whole", &words(&["max_train_steps=4"]));
    // The empty caption, and pictures as they are and mirrored.
    assert!(log.contains("encoded 7 captions"), "{log}");
    assert!(log.contains("encoded 12 images"), "{log}");
    let log = place.train("parts", &words(&["max_train_steps=2"]));
    assert!(!log.contains("encoded"), "{log}");
    // A shard that is damaged is made again, as it was.
    let shards = place.shards();
    let damaged = shards
        .iter()
        .max_by_key(|path| fs::metadata(path).unwrap().len())
        .unwrap();
    let bytes = fs::read(damaged).unwrap();
    fs::write(damaged, &bytes[..bytes.len() / 2]).unwrap();
    let log = place.train("parts", &words(&["max_train_steps=4"]));
    assert!(
        log.contains("it is made again") && log.contains("continuing from"),
        "{log}"
    );
    assert_eq!(fs::read(damaged).unwrap(), bytes);
    assert_eq!(place.losses("whole"), place.losses("parts"));
    for file in [
        "unet/diffusion_pytorch_model.safetensors",
        "optimizer.safetensors",
    ] {
        let [a, b] =
            ["whole", "parts"].map(|out| fs::read(place.checkpoint(out, 4).join(file)).unwrap());
        assert!(a == b, "{file} differs between the runs");
    }

    // What is not trained is the model's own file, here and in the checkpoint of the continued run.
    for file in [
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer_2/merges.txt",
    ] {
        let inode = |dir: PathBuf| fs::metadata(dir.join(file)).unwrap().ino();
        let own = inode(place.path("model"));
        assert_eq!(own, inode(place.checkpoint("whole", 4)), "{file}");
        assert_eq!(own, inode(place.checkpoint("parts", 4)), "{file}");
    }
    let run = format!(
        "pretrained_model_name_or_path={}",
        place.path("whole").display()
    );
    let drawn = place.generate("images", &[&run]);
    assert_ne!(drawn, place.generate("images", &[&place.model()]));
    // By the run's own configuration, and as a model of its own.
    assert_eq!(drawn, place.generate("whole", &[]));
    let folder = format!(
        "pretrained_model_name_or_path={}",
        place.checkpoint("whole", 4).display()
    );
    assert_eq!(drawn, place.generate("images", &[&folder]));

    let (code, log) = place.try_train("parts", &words(&["max_train_steps=6", "random_flip=False"]));
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("random_flip: saved true, now false"), "{log}");
    let adam = words(&["max_train_steps=6"]);
    let adam: Vec<&str> = adam
        .into_iter()
        .filter(|word| !word.starts_with("optimizer_"))
        .collect();
    let (code, log) = place.try_train("parts", &adam);
    assert_eq!(code, Some(1), "{log}");
    assert!(
        log.contains("optimizer_type: saved \"Lion\", now \"AdamW\""),
        "{log}"
    );
    let (code, log) = place.try_train("parts", &["max_train_steps=6", "lora_rank=2"]);
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("a checkpoint of other training"), "{log}");
}

/// Updates of SDXL's UNet in float32, and of one whose weights are stored in int8: both are loaded as they were trained.
#[test]
fn low_rank_updates_are_loaded_as_they_were_trained() {
    let place = Place::new("sdxl");
    let words = [
        "lora_rank=2",
        "lora_alpha=3",
        "lora_kohya=True",
        "per_device_batch_size=2",
        "learning_rate_schedule_steps=4",
    ];
    let grid = [
        "sample_every=4",
        "sample_prompts=a picture",
        "seed=3",
        "do_classifier_free_guidance=False",
    ];
    let with = |more: &[&'static str]| [&words[..], &grid, more].concat();
    let log = place.train("whole", &with(&["max_train_steps=4"]));
    assert!(log.contains("of them trained"), "{log}");
    // With all encoded, a start reads neither pictures nor the encoders' weights.
    let pictures = (0..6).map(|at| format!("data/{at}.png"));
    let parts = [
        "vae/diffusion_pytorch_model",
        "text_encoder/model",
        "text_encoder_2/model",
    ];
    let parts = parts.map(|part| format!("model/{part}.safetensors"));
    let unread: Vec<String> = pictures.chain(parts).collect();
    place.while_spoiled(&unread, || {
        let first = [&words[..], &["seed=3", "max_train_steps=2"]].concat();
        let log = place.train("parts", &first);
        assert!(!log.contains("encoded"), "{log}");
    });
    place.train("parts", &with(&["max_train_steps=4"]));
    assert_eq!(place.losses("whole"), place.losses("parts"));
    let saved = place.checkpoint("whole", 4);
    let names: BTreeSet<String> = fs::read_dir(&saved)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let expected = [
        "config.json",
        "kohya_lora.safetensors",
        "manifest.json",
        "optimizer.safetensors",
        "pytorch_lora_weights.safetensors",
        "state.json",
    ];
    assert_eq!(names, expected.map(str::to_owned).into());
    same_updates(&place.path("model"), &saved);

    // The image that was drawn while the model was trained is the upper left corner of the last grid.
    let drawn = place.generate("whole", &["do_classifier_free_guidance=False"]);
    let grid = image::open(place.path("whole").join("samples/step-00000004-00001.png")).unwrap();
    assert!(in_grid(&drawn, &grid.to_rgb8()));
    let lora = format!(
        "lora_config.lora_model_name_or_path=['{}']",
        saved.display()
    );
    let loaded = place.generate("images", &["do_classifier_free_guidance=False", &lora]);
    assert_eq!(loaded, drawn);
    let base = place.generate("images", &["do_classifier_free_guidance=False"]);
    assert!(!in_grid(&base, &grid.to_rgb8()));
}

/// Whether the grid shows the image, enlarged by whole numbers, up to rounding.
pub fn in_grid(image: &image::RgbImage, grid: &image::RgbImage) -> bool {
    let scale = maxdiff::pipelines::image_file::visible_scale(image.width());
    let [width, height] = [image.width() * scale, image.height() * scale];
    (0..=grid.width() - width).any(|left| {
        (0..=grid.height().min(height + 64) - height).any(|top| {
            image.enumerate_pixels().all(|(x, y, pixel)| {
                let shown = grid.get_pixel(left + x * scale, top + y * scale);
                pixel.0.iter().zip(shown.0).all(|(a, b)| a.abs_diff(b) <= 1)
            })
        })
    })
}

/// The files of both dialects hold the same updates.
fn same_updates(model: &Path, saved: &Path) {
    let unet = Checkpoint::open(&model.join("unet")).unwrap();
    let targets: Vec<LoraTarget<'_>> = unet
        .iter()
        .map(|(key, shape)| LoraTarget {
            root: "unet",
            key,
            dims: &shape.dims,
        })
        .collect();
    let [peft, kohya] =
        ["pytorch_lora_weights.safetensors", "kohya_lora.safetensors"].map(|file| {
            let file = LoraFile::open(&saved.join(file)).unwrap();
            file.resolve(&targets, LoraScale::from(1.0)).unwrap()
        });
    assert_eq!(peft.ranks(), kohya.ranks());
    assert!(peft.ranks().len() >= 16, "{:?}", peft.ranks());
    let file = Checkpoint::open(&saved.join("pytorch_lora_weights.safetensors")).unwrap();
    for (weight, rank) in peft.ranks() {
        assert_eq!(rank, 2);
        let key = weight.strip_prefix("unet/").unwrap();
        let [a, b] = [&peft, &kohya].map(|adapter| adapter.factors("unet", key).unwrap().unwrap());
        assert_eq!((&a.down, &a.up), (&b.down, &b.up), "{key}");
        let layer = key.strip_suffix(".weight").unwrap();
        let up = file
            .read_as(&format!("unet.{layer}.lora_B.weight"), DType::F32)
            .unwrap();
        let [up, scaled] = [&up, &a.up].map(|tensor| tensor.to_f32_vec().unwrap());
        // Alpha 3, rank 2.
        assert!(
            up.iter()
                .zip(&scaled)
                .all(|(up, scaled)| up * 1.5 == *scaled),
            "{key}"
        );
    }
}

#[test]
fn updates_beside_stored_integers_follow_those_beside_floats() {
    let place = Place::new("sd15");
    let int8 = place.path("int8");
    let output = Command::new(env!("CARGO_BIN_EXE_maxdiff-rs"))
        .arg("quantize")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/base15.yml"))
        .args([
            "quantization=int8_w8a16",
            "activations_dtype=float32",
            &place.model(),
        ])
        .arg("--output")
        .arg(&int8)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));

    let lora = [
        "lora_rank=2",
        "per_device_batch_size=6",
        "max_train_steps=4",
        "learning_rate=1e-3",
    ];
    place.train("float", &lora);
    let stored = format!("pretrained_model_name_or_path={}", int8.display());
    let own = [&lora[..], &[stored.as_str()]].concat();
    place.train("stored", &own);
    let (float, stored_losses) = (place.losses("float"), place.losses("stored"));
    for (float, stored) in float.iter().zip(&stored_losses) {
        // Weights of 8 bits: at most half a step of 1/127 of a row's largest in each.
        assert!(
            float != stored && (float - stored).abs() < 0.02 * float,
            "{float} {stored}"
        );
    }
    // Nothing but the factors has an optimizer.
    let optimizer = place.checkpoint("stored", 4).join("optimizer.safetensors");
    let optimizer = Checkpoint::open(&optimizer).unwrap();
    let moments: Vec<&str> = optimizer
        .names()
        .filter(|name| name.starts_with("optimizer/m/"))
        .collect();
    assert!(
        !moments.is_empty() && moments.iter().all(|name| name.contains(".lora_")),
        "{moments:?}"
    );

    let (code, log) = place.try_train("full", &["max_train_steps=1", &stored]);
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("lora_rank=16"), "{log}");
    let words = [&own[..], &["quantization=int8"]].concat();
    let (code, log) = place.try_train("int8", &words);
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("int8_w8a16"), "{log}");
}

/// One run, beside the same in int8, over two devices with weights sharded too and from archives, and with another
/// autoencoder.
#[test]
fn variants_of_a_run_follow_it() {
    let place = Place::new("sd15");
    let words = [
        "max_train_steps=4",
        "learning_rate=1e-3",
        "optimizer_type=Lion",
        "checkpoint_copies=True",
    ];
    let of_six = [&words[..], &["per_device_batch_size=6"]].concat();
    place.train("float", &of_six);
    let float = place.losses("float");
    let vae = "vae/diffusion_pytorch_model.safetensors";
    let [own, copied] =
        [place.path("model"), place.checkpoint("float", 4)].map(|dir| dir.join(vae));
    assert_ne!(
        fs::metadata(&own).unwrap().ino(),
        fs::metadata(&copied).unwrap().ino()
    );
    assert_eq!(fs::read(&own).unwrap(), fs::read(&copied).unwrap());

    // Where every place counts a fifth, so does the loss.
    place.add_masks(|_| 51);
    let masks = place.masks();
    let [masked, folder] = masks.each_ref().map(String::as_str);
    let one = [&["max_train_steps=1", masked, folder], &of_six[1..]].concat();
    place.train("masked", &one);
    let masked = place.losses("masked")[0];
    assert!(
        (masked - float[0] / 5.0).abs() < 1e-5 * float[0],
        "{masked} {float:?}"
    );

    let log = place.train("int8", &[&of_six[..], &["quantization=int8"]].concat());
    assert!(
        log.contains("in int8 (int8, a scale a channel, aqt)"),
        "{log}"
    );
    for (float, int8) in float.iter().zip(&place.losses("int8")) {
        assert!(
            float != int8 && (float - int8).abs() < 0.05 * float,
            "{float} {int8}"
        );
    }

    // The same sums in another order, and the same pictures in the same order from an archive, as what is encoded tells.
    place.archive();
    let two = [
        "dataset_type=webdataset",
        "per_device_batch_size=3",
        "num_devices=2",
        "ici_fsdp_parallelism=2",
        "ici_data_parallelism=1",
    ];
    let log = place.train("two", &[&words[..], &two].concat());
    assert!(!log.contains("encoded"), "{log}");
    for (one, two) in float.iter().zip(&place.losses("two")) {
        assert!((one - two).abs() < 1e-4 * one, "{one} {two}");
    }
    place.record();
    let log = place.train(
        "records",
        &[&of_six[..], &["dataset_type=tfrecord"]].concat(),
    );
    assert!(!log.contains("encoded"), "{log}");
    assert_eq!(float, place.losses("records"));

    let other = place.path("vae");
    copy(&golden("pipeline_sdxl").join("vae"), &other);
    let other = format!("vae_model_name_or_path={}", other.display());
    let velocity = [other.as_str(), "prediction_type=v_prediction"];
    let log = place.train("other", &[&of_six[..], &velocity].concat());
    assert!(
        log.contains("encoded 6 images") && !log.contains("captions"),
        "{log}"
    );
    assert_ne!(float, place.losses("other"));
    // The checkpoint has the autoencoder that it was trained with.
    let [own, saved] = [golden("pipeline_sdxl"), place.checkpoint("other", 4)].map(|dir| {
        let file = Checkpoint::open(&dir.join("vae")).unwrap();
        let read = |name: &str| (name.to_owned(), file.read(name).unwrap());
        file.names().map(read).collect::<Vec<_>>()
    });
    assert!(!own.is_empty() && own == saved);
    // It says what the model predicts now, and else what the model's own said.
    let [mut own, saved] = [place.path("model"), place.checkpoint("other", 4)].map(|dir| {
        let text = fs::read_to_string(dir.join("scheduler/scheduler_config.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    });
    assert_ne!(own, saved);
    own["prediction_type"] = "v_prediction".into();
    assert_eq!(own, saved);
}

#[test]
fn what_cannot_be_trained_is_named_before_anything_is_computed() {
    let place = Place::new("sd15");
    for (words, code, expected) in [
        (
            &["lora_rank=2", "lora_target_modules=to_qq"][..],
            2,
            "'to_qq' matches no linear layer",
        ),
        (&["lora_rank=64"], 2, "has rank 8 at most"),
        (
            &["lora_rank=2", "lora_target_modules=('"],
            2,
            "lora_target_modules",
        ),
        (&["model_family=sdxl"], 2, "expects SDXL"),
        (
            &["cache_latents_text_encoder_outputs=False"],
            2,
            "cache_latents_text_encoder_outputs=False",
        ),
        (&["lora_alpha=4"], 2, "it needs lora_rank above 0"),
        (&["lora_dropout=0.1"], 2, "it needs lora_rank above 0"),
        (&["lora_plus_ratio=4"], 2, "it needs lora_rank above 0"),
        (
            &["lora_rank=2", "lora_dropout=1"],
            2,
            "expected at least 0 and less than 1",
        ),
        (
            &["lora_rank=2", "lora_plus_ratio=0"],
            2,
            "lora_plus_ratio: 0.0 is out of range",
        ),
        (
            &[
                "lora_rank=2",
                "lora_plus_ratio=4",
                "optimizer_type=Prodigy",
                "learning_rate=1",
            ],
            2,
            "leave lora_plus_ratio out",
        ),
        (&["resume=must"], 2, "resume=must"),
        (
            &["masked_loss=folder", "conditioning_data_dir=/nowhere"],
            2,
            "conditioning_data_dir=/nowhere: no such folder",
        ),
        (&["masked_loss=alpha"], 1, "none of the images in"),
        (&["caption_shuffles=2"], 2, "is 'a picture of 0'"),
    ] {
        let (found, log) = place.try_train("none", words);
        assert_eq!(found, Some(code), "{words:?}: {log}");
        assert!(log.contains(expected), "{words:?}: {log}");
        assert!(!log.contains("compiled in"), "{words:?}: {log}");
    }
    assert!(!place.path("none").exists());
}

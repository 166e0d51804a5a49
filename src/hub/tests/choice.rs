//! Which files of a repository are taken.

use super::*;
use crate::models::{Family, Part};

#[test]
fn shards_are_those_of_the_index() {
    let index = "unet/diffusion_pytorch_model.safetensors.index.json";
    let shard = |n: usize| format!("unet/diffusion_pytorch_model-0000{n}-of-00002.safetensors");
    let mut repository = pipeline();
    repository.remove(UNET);
    let map = |one: &str, two: &str| format!(r#"{{"weight_map": {{"a": "{one}", "b": "{two}"}}}}"#);
    let short = |n: usize| shard(n)["unet/".len()..].to_owned();
    repository.insert(index.to_owned(), map(&short(1), &short(2)).into());
    for n in [1, 2, 3] {
        repository.insert(shard(n), format!("shard {n}").into());
    }
    let hub = Hub::of(repository.clone());
    hub.fetch(MODEL).unwrap();
    let found = names(&hub.snapshot());
    for name in [index, &shard(1), &shard(2)] {
        assert!(found.iter().any(|n| n == name), "{found:?}");
    }
    assert!(!found.contains(&shard(3)));
    // Without one of them the cache is not whole.
    fs::remove_file(hub.snapshot().join(shard(2))).unwrap();
    hub.server.log();
    hub.fetch(MODEL).unwrap();
    assert!(!hub.server.log().is_empty());

    let mut lacking = repository.clone();
    lacking.remove(&shard(2));
    let error = Hub::of(lacking).error(MODEL);
    assert!(
        error.contains("missing: unet/") && error.contains("00002-of-00002"),
        "{error}"
    );
    repository.insert(
        index.to_owned(),
        map(&short(1), "../../x.safetensors").into(),
    );
    let hub = Hub::of(repository);
    let error = hub.error(MODEL);
    assert!(
        error.contains("only .safetensors files of the same folder"),
        "{error}"
    );
    assert!(hub.server.log().iter().all(|r| !r.elsewhere));
}

/// A text encoder that a model may go without is not downloaded, and neither is its tokenizer.
#[test]
fn a_part_may_be_left_out() {
    let mut repository = pipeline();
    let index = String::from_utf8(repository["model_index.json"].clone()).unwrap();
    let third = r#"{"text_encoder_3": ["transformers", "T5EncoderModel"], "tokenizer_3": ["transformers", "T"],"#;
    let index = index.replacen('{', third, 1);
    repository.insert("model_index.json".to_owned(), index.into());
    repository.extend(files(&[
        ("text_encoder_3/config.json", "{}"),
        ("text_encoder_3/model.safetensors", "the weights of T5"),
        ("tokenizer_3/spiece.model", "pieces"),
    ]));
    let hub = Hub::of(repository);
    let of_third = |name: &String| name.contains("_3/");
    let without = Some(Part::TextEncoder3);
    hub.fetch(Wanted::Model {
        expected: None,
        without,
    })
    .unwrap();
    assert!(!names(&hub.snapshot()).iter().any(of_third));
    hub.fetch(MODEL).unwrap();
    let found = names(&hub.snapshot());
    assert_eq!(found.iter().filter(|name| of_third(name)).count(), 3);
}

#[test]
fn a_variant_is_taken_where_it_is_the_only_one() {
    let half = "unet/diffusion_pytorch_model.fp16.safetensors";
    let mut repository = pipeline();
    repository.remove(UNET);
    let hub = Hub::of(repository.clone());
    hub.fetch(MODEL).unwrap();
    assert!(hub.snapshot().join(half).is_file());
    hub.server.log();
    hub.fetch(MODEL).unwrap();
    assert_eq!(hub.server.log(), []);

    repository.insert(
        "unet/diffusion_pytorch_model.non_ema.safetensors".to_owned(),
        vec![1],
    );
    let error = Hub::of(repository).error(MODEL);
    assert!(
        error.contains("several variants") && error.contains(half),
        "{error}"
    );
}

#[test]
fn pickles_are_refused_before_anything_large_is_fetched() {
    let mut repository = pipeline();
    repository.remove(UNET);
    repository.remove("unet/diffusion_pytorch_model.fp16.safetensors");
    let hub = Hub::of(repository);
    let error = hub.error(MODEL);
    assert!(
        error.contains("unet/diffusion_pytorch_model.bin"),
        "{error}"
    );
    assert!(error.contains("save_pretrained"), "{error}");
    assert!(
        hub.server
            .log()
            .iter()
            .all(|r| !r.elsewhere && !r.path.ends_with(".bin"))
    );

    let hub = Hub::of(files(&[("v1-5.ckpt", "a pickle"), ("README.md", "")]));
    let error = hub.error(MODEL);
    assert!(
        error.contains("v1-5.ckpt") && error.contains("pickles"),
        "{error}"
    );
}

#[test]
fn hostile_names_lead_nowhere() {
    for name in [
        "../../evil",
        "/etc/evil",
        "unet/../../evil",
        "a//b",
        "./x",
        "a\\..\\b",
        "a/..",
    ] {
        let mut repository = pipeline();
        repository.insert(name.to_owned(), b"evil".to_vec());
        let hub = Hub::of(repository);
        let error = hub.fetch(MODEL).unwrap_err();
        assert!(
            matches!(error, HubError::UnsafePath { .. }),
            "{name}: {error}"
        );
        assert_eq!(hub.server.log().len(), 1);
        assert!(!hub.dir().exists());
    }
    for headers in [
        "ETag: \"../../evil\"\r\nContent-Length: 2\r\n",
        "ETag: \"..\"\r\nContent-Length: 2\r\n",
        "ETag: \"\"\r\nContent-Length: 2\r\n",
        "Content-Length: 2\r\n",
    ] {
        let hub = Hub::of(pipeline());
        hub.server.fail("vae/config.json", Fault::Header(headers));
        let error = hub.fetch(MODEL).unwrap_err();
        assert!(matches!(error, HubError::Answer { .. }), "{error}");
    }
    let hub = Hub::of(pipeline());
    hub.server
        .state()
        .revisions
        .insert("main".to_owned(), "../../evil".to_owned());
    let error = hub.error(MODEL);
    assert!(error.contains("not the hash of a commit"), "{error}");
    // A page of something else, such as of the network one has to log in to.
    hub.server
        .fail("/revision/main", Fault::Header("Content-Length: 0\r\n"));
    let error = hub.error(MODEL);
    assert!(error.contains("does not answer like the hub"), "{error}");
}

#[test]
fn a_model_of_another_family_is_refused_before_its_weights() {
    let hub = Hub::of(pipeline());
    let wanted = Wanted::Model {
        expected: Some((Family::Sdxl, "base_xl.yml")),
        without: None,
    };
    for _ in 0..2 {
        let error = hub.error(wanted);
        assert!(
            error.contains("base_xl.yml expects SDXL; use sd15"),
            "{error}"
        );
    }
    assert!(hub.server.log().iter().all(|r| !r.elsewhere));
    let mut repository = pipeline();
    let flux = r#"{"_class_name": "FluxKontextPipeline", "transformer": ["diffusers", "X"]}"#;
    repository.insert("model_index.json".to_owned(), flux.into());
    let error = Hub::of(repository).error(MODEL);
    assert!(
        error.contains("this is FLUX.1 Kontext, which is not supported"),
        "{error}"
    );
}

#[test]
fn a_repository_may_be_a_single_file() {
    let mut hub = Hub::of(files(&[
        ("xl.safetensors", "a whole model"),
        ("README.md", ""),
    ]));
    let fetched = hub.fetch(MODEL).unwrap();
    // The folder of its only file.
    assert_eq!(fetched.path, hub.snapshot());
    assert_eq!(names(&hub.snapshot()), ["xl.safetensors"]);
    assert!(
        hub.dir()
            .join(".no_exist")
            .join(COMMIT)
            .join("model_index.json")
            .is_file()
    );
    hub.server.log();
    hub.fetch(MODEL).unwrap();
    assert_eq!(hub.server.log(), []);
    // Without that note the rest of a pipeline may be elsewhere: the hub is asked, if it may be.
    fs::remove_dir_all(hub.dir().join(".no_exist")).unwrap();
    hub.fetch(MODEL).unwrap();
    assert_eq!(hub.server.log().len(), 1);
    fs::remove_dir_all(hub.dir().join(".no_exist")).unwrap();
    hub.options.offline = Some("HF_HUB_OFFLINE");
    hub.fetch(MODEL).unwrap();

    let two = files(&[("a.safetensors", "a"), ("b.safetensors", "b")]);
    let error = Hub::of(two).error(MODEL);
    assert!(
        error.contains("a.safetensors, b.safetensors; download one"),
        "{error}"
    );
    let error = Hub::of(files(&[("README.md", "")])).error(MODEL);
    assert!(
        error.contains("it has README.md, and not model_index.json"),
        "{error}"
    );
}

#[test]
fn parts_tokenizers_and_loras_are_found_too() {
    let hub = Hub::of(files(&[
        ("config.json", "{}"),
        ("diffusion_pytorch_model.safetensors", "a ControlNet"),
        ("diffusion_pytorch_model.bin", "a pickle"),
        ("sub/other.safetensors", "x"),
    ]));
    assert_eq!(hub.fetch(Wanted::Part).unwrap().path, hub.snapshot());
    let found = names(&hub.snapshot());
    assert_eq!(
        found,
        ["config.json", "diffusion_pytorch_model.safetensors"]
    );

    let hub = Hub::of(files(&[
        ("config.json", "{}"),
        ("model.safetensors", "a CLIP model"),
        ("pytorch_model.bin", "a pickle"),
        ("preprocessor_config.json", "{}"),
        ("vocab.json", "{}"),
        ("merges.txt", ""),
        ("README.md", ""),
    ]));
    assert_eq!(hub.fetch(Wanted::Clip).unwrap().path, hub.snapshot());
    assert_eq!(
        names(&hub.snapshot()),
        [
            "config.json",
            "merges.txt",
            "model.safetensors",
            "preprocessor_config.json",
            "vocab.json"
        ]
    );
    let error = Hub::of(files(&[
        ("config.json", "{}"),
        ("pytorch_model.bin", "a pickle"),
        ("tokenizer.json", "{}"),
    ]))
    .error(Wanted::Clip);
    assert!(
        error.contains("transformers.CLIPModel.from_pretrained(\""),
        "{error}"
    );

    let whole = ("tokenizer.json", "{}");
    let hub = Hub::of(files(&[
        whole,
        ("special_tokens_map.json", "{}"),
        ("model.safetensors", "x"),
    ]));
    assert_eq!(hub.fetch(Wanted::Tokenizer).unwrap().path, hub.snapshot());
    assert_eq!(
        names(&hub.snapshot()),
        ["special_tokens_map.json", "tokenizer.json"]
    );
    let hub = Hub::of(pipeline());
    let fetched = hub.fetch(Wanted::Tokenizer).unwrap();
    assert_eq!(fetched.path, hub.snapshot().join("tokenizer"));
    let error = Hub::of(files(&[("README.md", "")])).error(Wanted::Tokenizer);
    assert!(
        error.contains("tokenizer.json, or vocab.json and merges.txt"),
        "{error}"
    );

    let lora = Wanted::Lora { file: None };
    let hub = Hub::of(files(&[
        ("pytorch_lora_weights.safetensors", "x"),
        ("o.safetensors", "y"),
    ]));
    let fetched = hub.fetch(lora).unwrap();
    assert_eq!(
        fetched.path,
        hub.snapshot().join("pytorch_lora_weights.safetensors")
    );
    let hub = Hub::of(files(&[
        ("a.safetensors", "x"),
        ("adapter_config.json", "{}"),
    ]));
    let fetched = hub.fetch(lora).unwrap();
    assert_eq!(fetched.path, hub.snapshot().join("a.safetensors"));
    assert_eq!(names(&hub.snapshot()).len(), 2);
    hub.server.log();
    hub.fetch(lora).unwrap();
    assert_eq!(hub.server.log(), []);
    let several = files(&[("a.safetensors", "a"), ("b.safetensors", "b")]);
    let hub = Hub::of(several);
    let error = hub.error(lora);
    assert!(error.contains("lora_config.weight_name"), "{error}");
    let file = Some("b.safetensors");
    assert_eq!(
        hub.fetch(Wanted::Lora { file }).unwrap().path,
        hub.snapshot()
    );
    assert_eq!(names(&hub.snapshot()), ["b.safetensors"]);
    let file = Some("c.safetensors");
    assert!(
        hub.error(Wanted::Lora { file })
            .contains("missing: c.safetensors")
    );
    let hub = Hub::of(files(&[("w.bin", "a pickle")]));
    let file = Some("w.bin");
    assert!(hub.error(Wanted::Lora { file }).contains("pickles"));
}

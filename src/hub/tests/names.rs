//! Names of repositories and revisions, and the environment.

use std::ffi::OsString;

use super::*;

#[test]
fn a_revision_is_a_branch_a_pull_request_or_a_commit() {
    let hub = Hub::of(pipeline());
    let other = "89abcdef0123456789abcdef0123456789abcdef";
    let mut state = hub.server.state();
    state
        .revisions
        .insert("refs/pr/95".to_owned(), other.to_owned());
    drop(state);
    let fetched = hub.fetch_at("refs/pr/95", MODEL).unwrap();
    assert_eq!(fetched.commit, other);
    assert_eq!(
        fs::read_to_string(hub.dir().join("refs/refs/pr/95")).unwrap(),
        other
    );
    assert!(
        hub.server.log()[0]
            .path
            .ends_with("/revision/refs%2Fpr%2F95")
    );

    // The same content is not downloaded for another commit.
    let fetched = hub.fetch_at(COMMIT, MODEL).unwrap();
    assert_eq!(fetched.path, hub.snapshot());
    assert_eq!(fetched.downloaded, 0);
    assert!(hub.server.log().iter().all(|r| !r.elsewhere));
    // A commit is no name to remember; it is found all the same.
    assert!(!hub.dir().join("refs").join(COMMIT).exists());
    hub.fetch_at(COMMIT, MODEL).unwrap();
    assert_eq!(hub.server.log(), []);

    let error = hub.fetch_at("typo", MODEL).unwrap_err();
    assert!(matches!(error, HubError::NoRevision { .. }), "{error}");
    assert!(error.to_string().contains("no revision 'typo'"), "{error}");
    for bad in [
        "../main", "/main", "a//b", "a/..", "a b", "a\nb", "a:b", "x/",
    ] {
        let error = Revision::parse(bad).unwrap_err();
        assert_eq!(error.revision, bad);
    }
}

#[test]
fn names_of_repositories_are_told_from_paths() {
    for name in [
        "stabilityai/stable-diffusion-xl-base-1.0",
        "CompVis/stable-diffusion-v1-4",
        "a/b",
        "some_one/it.is-2",
    ] {
        let repo = RepoId::parse(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(repo.to_string(), name);
    }
    for name in [
        "",
        "sdxl",
        "./models/sdxl",
        "../sdxl",
        "/models/sdxl",
        "models/sdxl/",
        "/sdxl",
        "sdxl/",
        "models/sdxl/unet",
        "models/sdxl.safetensors",
        "models/v1-5.ckpt",
        "~/sdxl",
        "a/..",
        "../b",
        "a/.b",
        "a/b--c",
        "a b/c",
        "a/b:c",
        "a/b\0",
        "C:\\a/b",
        "gs://a/b",
        "a/b.git",
        "-a/b",
    ] {
        assert_eq!(RepoId::parse(name), None, "{name}");
    }
    assert_eq!(RepoId::parse(&format!("a/{}", "b".repeat(97))), None);
}

#[test]
fn the_environment_is_that_of_huggingface_hub() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path();
    let of = |set: &[(&str, &str)]| {
        let set: BTreeMap<String, OsString> = set
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).into()))
            .collect();
        HubOptions::from_variables(&|name| set.get(name).cloned(), Some(home.to_owned()))
    };
    let options = of(&[]).unwrap();
    assert_eq!(options.endpoint, "https://huggingface.co");
    assert_eq!(options.cache, home.join(".cache/huggingface/hub"));
    assert_eq!((options.token, options.offline), (None, None));

    let xdg = ("XDG_CACHE_HOME", "/x");
    let hf_home = ("HF_HOME", "~/hf");
    let old = ("HUGGINGFACE_HUB_CACHE", "/old");
    let cache = |set: &[(&str, &str)]| of(set).unwrap().cache;
    assert_eq!(cache(&[xdg]), Path::new("/x/huggingface/hub"));
    assert_eq!(cache(&[xdg, hf_home]), home.join("hf/hub"));
    assert_eq!(cache(&[xdg, hf_home, old]), Path::new("/old"));
    assert_eq!(
        cache(&[hf_home, old, ("HF_HUB_CACHE", "/new")]),
        Path::new("/new")
    );
    assert_eq!(cache(&[hf_home, ("HF_HUB_CACHE", "")]), home.join("hf/hub"));

    let token = |set: &[(&str, &str)]| of(set).unwrap().token.map(|t| t.secret().to_owned());
    fs::create_dir_all(home.join("hf")).unwrap();
    fs::write(home.join("hf/token"), "hf_file\n").unwrap();
    fs::write(home.join("other"), "hf_other").unwrap();
    let other = ("HF_TOKEN_PATH", "~/other");
    assert_eq!(token(&[hf_home]).unwrap(), "hf_file");
    assert_eq!(token(&[hf_home, other]).unwrap(), "hf_other");
    assert_eq!(
        token(&[hf_home, other, ("HF_TOKEN", "hf_env")]).unwrap(),
        "hf_env"
    );
    assert!(of(&[("HF_TOKEN", "two words")]).is_err());

    let offline = |set: &[(&str, &str)]| of(set).unwrap().offline;
    assert_eq!(offline(&[("HF_HUB_OFFLINE", "1")]), Some("HF_HUB_OFFLINE"));
    assert_eq!(
        offline(&[("TRANSFORMERS_OFFLINE", "Yes")]),
        Some("TRANSFORMERS_OFFLINE")
    );
    assert_eq!(offline(&[("HF_HUB_OFFLINE", "0")]), None);

    let mirror = of(&[("HF_ENDPOINT", "https://mirror.example/hf/")]).unwrap();
    assert_eq!(mirror.endpoint, "https://mirror.example/hf");
    let error = of(&[("HF_ENDPOINT", "mirror.example")])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("HF_ENDPOINT=mirror.example: expected an address"),
        "{error}"
    );
    let none = HubOptions::from_variables(&|_| None, None).unwrap_err();
    assert!(matches!(none, HubError::NoHome));
}

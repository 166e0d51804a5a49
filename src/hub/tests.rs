mod server;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::*;
use crate::weights::source::Family;
use server::{COMMIT, Fault, REPO, Request, Server, etag, sha256};

const UNET: &str = "unet/diffusion_pytorch_model.safetensors";
const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
const MODEL: Wanted<'static> = Wanted::Model { expected: None };

fn files(entries: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
    let entry = |(name, text): &(&str, &str)| ((*name).to_owned(), text.as_bytes().to_vec());
    entries.iter().map(entry).collect()
}

/// A small Stable Diffusion 1.x, and what a repository has besides.
fn pipeline() -> BTreeMap<String, Vec<u8>> {
    let mut files = files(&[
        (
            "model_index.json",
            r#"{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"],
                "vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"],
                "text_encoder_2": [null, null], "tokenizer": ["transformers", "CLIPTokenizer"],
                "scheduler": ["diffusers", "DDIMScheduler"], "safety_checker": ["x", "Y"]}"#,
        ),
        ("unet/config.json", r#"{"cross_attention_dim": 768}"#),
        (VAE, "the weights of the VAE"),
        ("vae/config.json", "{}"),
        ("text_encoder/config.json", "{}"),
        (
            "text_encoder/model.safetensors",
            "the weights of the text encoder",
        ),
        ("tokenizer/vocab.json", "{}"),
        ("tokenizer/merges.txt", ""),
        ("tokenizer/tokenizer_config.json", "{}"),
        ("scheduler/scheduler_config.json", "{}"),
        ("README.md", "read me"),
        ("safety_checker/model.safetensors", "not needed"),
        ("unet/diffusion_pytorch_model.bin", "a pickle"),
        ("unet/diffusion_flax_model.msgpack", "for Flax"),
        (
            "unet/diffusion_pytorch_model.fp16.safetensors",
            "in half precision",
        ),
    ]);
    files.insert(UNET.to_owned(), large());
    files
}

/// Content of more than one block of the client.
fn large() -> Vec<u8> {
    (0..600_000u32).flat_map(u32::to_le_bytes).collect()
}

struct Hub {
    server: Server,
    folder: tempfile::TempDir,
    options: HubOptions,
}

impl Hub {
    fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        let server = Server::start(files);
        let folder = tempfile::tempdir().unwrap();
        let options = HubOptions {
            endpoint: server.url.clone(),
            cache: folder.path().to_owned(),
            token: None,
            offline: None,
            proxies: false,
            certificates: None,
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(10),
            attempts: 3,
            backoff: Duration::from_millis(1),
        };
        Hub {
            server,
            folder,
            options,
        }
    }

    fn fetch(&self, wanted: Wanted<'_>) -> Result<Fetched> {
        self.fetch_at("main", wanted)
    }

    fn fetch_at(&self, revision: &str, wanted: Wanted<'_>) -> Result<Fetched> {
        let repo = RepoId::parse(REPO).unwrap();
        let revision = Revision::parse(revision)?;
        fetch(&repo, &revision, &wanted, &self.options, &mut |_| {})
    }

    fn error(&self, wanted: Wanted<'_>) -> String {
        self.fetch(wanted).unwrap_err().to_string()
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("models--some--model")
    }

    fn snapshot(&self) -> PathBuf {
        self.dir().join("snapshots").join(COMMIT)
    }

    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir().join("blobs")).into_iter().flatten();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The requests for the content of a large file since the last look.
    fn content_requests(&self, name: &str) -> Vec<Request> {
        let mut log = self.server.log();
        log.retain(|r| r.elsewhere && r.path.ends_with(name));
        log
    }
}

fn names(snapshot: &Path) -> Vec<String> {
    let cache = RepoCache::new(Path::new(""), &RepoId::parse(REPO).unwrap());
    assert!(snapshot.is_absolute());
    cache
        .files(snapshot.to_str().unwrap())
        .unwrap()
        .into_iter()
        .collect()
}

const NEEDED: [&str; 11] = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "unet/config.json",
    UNET,
    "vae/config.json",
    VAE,
];

#[test]
fn a_model_is_laid_out_as_huggingface_hub_does_and_needs_no_network_again() {
    let hub = Hub::of(pipeline());
    let mut events = Vec::new();
    let repo = RepoId::parse(REPO).unwrap();
    let main = Revision::parse("").unwrap();
    let fetched = fetch(&repo, &main, &MODEL, &hub.options, &mut |event| {
        events.push(format!("{event:?}"));
    })
    .unwrap();
    assert_eq!(fetched.path, hub.snapshot());
    assert_eq!(fetched.commit, COMMIT);
    let needed: usize = NEEDED.iter().map(|n| pipeline()[*n].len()).sum();
    assert_eq!(fetched.downloaded, needed as u64);

    // Exactly what is needed, whole.
    assert_eq!(names(&hub.snapshot()), NEEDED);
    for name in NEEDED {
        assert_eq!(
            fs::read(hub.snapshot().join(name)).unwrap(),
            pipeline()[name],
            "{name}"
        );
    }
    let link = fs::read_link(hub.snapshot().join(UNET)).unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(sha256(&large())));
    let link = fs::read_link(hub.snapshot().join("model_index.json")).unwrap();
    let index = etag("model_index.json", &pipeline()["model_index.json"]);
    assert_eq!(link, Path::new("../../blobs").join(index));
    assert_eq!(
        fs::read_to_string(hub.dir().join("refs/main")).unwrap(),
        COMMIT
    );
    assert!(
        hub.blobs().iter().all(|name| !name.contains('.')),
        "{:?}",
        hub.blobs()
    );

    // Weights last, so that an interrupted download is not taken for a whole one.
    let log = hub.server.log();
    let first = log.iter().position(|r| r.elsewhere).unwrap();
    let later = log[first..].iter().filter(|r| r.method == "GET");
    assert!(later.clone().count() >= 3);
    assert!(
        later.clone().all(|r| r.path.ends_with(".safetensors")),
        "{log:?}"
    );

    assert!(events[0].starts_with("Start"), "{}", events[0]);
    assert!(events.contains(&"Done".to_owned()));
    let last = events.iter().rfind(|e| e.starts_with("Bytes")).unwrap();
    let to_come = events[0]
        .split("bytes: ")
        .nth(1)
        .unwrap()
        .trim_end_matches(" }");
    assert_eq!(*last, format!("Bytes {{ done: {to_come} }}"));

    let again = hub.fetch(MODEL).unwrap();
    assert_eq!((again.downloaded, again.path), (0, fetched.path));
    assert_eq!(hub.server.log(), []);
}

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
        assert!(matches!(error, HubError::Revision { .. }), "{bad}");
    }
}

#[test]
fn what_breaks_off_goes_on_where_it_stopped() {
    let hub = Hub::of(pipeline());
    let half = large().len() / 2;
    hub.server.fail(UNET, Fault::Truncate(half));
    hub.server.fail(UNET, Fault::Truncate(1000));
    hub.fetch(MODEL).unwrap();
    let asked: Vec<_> = hub.content_requests(UNET).iter().map(|r| r.from).collect();
    assert_eq!(asked, [None, Some(half), Some(half + 1000)]);
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
}

#[test]
fn what_a_process_left_is_gone_on_with() {
    let mut hub = Hub::of(pipeline());
    hub.options.attempts = 1;
    hub.server.fail(UNET, Fault::Truncate(500_000));
    let error = hub.error(MODEL);
    assert!(
        error.contains("(1 attempts)") && error.contains(UNET),
        "{error}"
    );
    let left = hub
        .dir()
        .join("blobs")
        .join(format!("{}.incomplete", sha256(&large())));
    assert_eq!(fs::metadata(&left).unwrap().len(), 500_000);
    assert!(!hub.dir().join("refs").exists());
    hub.server.log();

    let fetched = hub.fetch(MODEL).unwrap();
    assert_eq!(hub.content_requests(UNET)[0].from, Some(500_000));
    assert!(fetched.downloaded < large().len() as u64 - 400_000);
    assert!(!left.exists());
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
}

#[test]
fn what_was_left_of_something_else_is_downloaded_again() {
    for left in [
        vec![7; 1000],
        vec![7; large().len()],
        vec![7; large().len() + 5],
    ] {
        let hub = Hub::of(pipeline());
        let blobs = hub.dir().join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(
            blobs.join(format!("{}.incomplete", sha256(&large()))),
            &left,
        )
        .unwrap();
        hub.fetch(MODEL).unwrap();
        assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
        assert_eq!(hub.content_requests(UNET).last().unwrap().from, None);
    }
}

#[test]
fn a_server_without_ranges_starts_again() {
    let hub = Hub::of(pipeline());
    hub.server.fail(UNET, Fault::Truncate(1000));
    hub.server.fail(UNET, Fault::IgnoreRange);
    hub.fetch(MODEL).unwrap();
    assert_eq!(hub.content_requests(UNET).len(), 2);
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
}

#[test]
fn wrong_content_is_refused_and_not_kept() {
    let hub = Hub::of(pipeline());
    hub.server.fail(VAE, Fault::Corrupt);
    let error = hub.fetch(MODEL).unwrap_err();
    let mut bytes = pipeline()[VAE].clone();
    let expected = sha256(&bytes);
    bytes[0] ^= 1;
    let text = error.to_string();
    for part in [VAE, REPO, &expected, &sha256(&bytes)] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(matches!(error, HubError::Hash { .. }));
    assert!(!hub.snapshot().join(VAE).exists());
    assert!(hub.blobs().iter().all(|name| !name.starts_with(&expected)));
    hub.fetch(MODEL).unwrap();

    let hub = Hub::of(pipeline());
    hub.server.fail(VAE, Fault::Longer);
    let error = hub.fetch(MODEL).unwrap_err();
    assert!(matches!(error, HubError::Size { .. }), "{error}");
    assert!(hub.blobs().iter().all(|name| !name.starts_with(&expected)));
}

#[test]
fn a_damaged_blob_is_replaced() {
    let hub = Hub::of(pipeline());
    hub.fetch(MODEL).unwrap();
    fs::write(
        hub.dir().join("blobs").join(sha256(&pipeline()[VAE])),
        "cut",
    )
    .unwrap();
    fs::remove_file(hub.snapshot().join(VAE)).unwrap();
    hub.fetch(MODEL).unwrap();
    assert_eq!(fs::read(hub.snapshot().join(VAE)).unwrap(), pipeline()[VAE]);
}

#[test]
fn a_connection_that_stalls_is_given_up_and_resumed() {
    let mut hub = Hub::of(pipeline());
    hub.options.read_timeout = Duration::from_millis(300);
    hub.server.fail(UNET, Fault::Stall(100_000));
    let start = Instant::now();
    hub.fetch(MODEL).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
    assert_eq!(
        hub.content_requests(UNET).last().unwrap().from,
        Some(100_000)
    );
}

#[test]
fn failures_that_may_pass_are_tried_again() {
    let hub = Hub::of(pipeline());
    hub.server.fail("/revision/main", Fault::Status(503, ""));
    hub.server.fail("/revision/main", Fault::Truncate(10));
    hub.server.fail("vae/config.json", Fault::Status(500, ""));
    hub.server
        .fail(VAE, Fault::Status(429, "Retry-After: 0\r\n"));
    hub.fetch(MODEL).unwrap();

    let hub = Hub::of(pipeline());
    for _ in 0..3 {
        hub.server.fail("/revision/main", Fault::Status(502, ""));
    }
    let error = hub.error(MODEL);
    assert!(error.contains("status 502 (3 attempts)"), "{error}");
    assert_eq!(hub.server.log().len(), 3);

    // Nobody there.
    let mut hub = Hub::of(pipeline());
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    hub.options.endpoint = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let error = hub.error(MODEL);
    assert!(
        error.contains("(3 attempts)") && error.contains("HF_ENDPOINT"),
        "{error}"
    );
}

#[test]
fn offline_takes_what_is_there_and_names_what_is_not() {
    let mut hub = Hub::of(pipeline());
    hub.options.offline = Some("HF_HUB_OFFLINE");
    let error = hub.error(MODEL);
    let dir = hub.dir().display().to_string();
    for part in [
        "some/model at main",
        &dir,
        "nothing of it",
        "HF_HUB_OFFLINE forbids",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    hub.options.offline = None;
    hub.fetch(MODEL).unwrap();
    hub.server.log();
    hub.options.offline = Some("HF_HUB_OFFLINE");
    assert_eq!(hub.fetch(MODEL).unwrap().path, hub.snapshot());

    let error = hub.fetch_at("v2", MODEL).unwrap_err().to_string();
    assert!(
        error.contains("the revision v2 is not there; it has main, 0123"),
        "{error}"
    );
    for gone in [
        VAE,
        "scheduler/scheduler_config.json",
        "tokenizer/merges.txt",
    ] {
        let aside = hub.folder.path().join("aside");
        fs::rename(hub.snapshot().join(gone), &aside).unwrap();
        let error = hub.error(MODEL);
        let folder = gone.split('/').next().unwrap();
        assert!(error.contains(&format!("missing: {folder}/")), "{error}");
        fs::rename(&aside, hub.snapshot().join(gone)).unwrap();
    }
    assert_eq!(hub.server.log(), []);
}

#[test]
fn a_cache_of_plain_files_is_as_good() {
    let mut hub = Hub::of(BTreeMap::new());
    for name in NEEDED {
        let path = hub.snapshot().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &pipeline()[name]).unwrap();
    }
    fs::create_dir_all(hub.dir().join("refs")).unwrap();
    // As Python writes it, and as an editor does.
    fs::write(hub.dir().join("refs/main"), format!("{COMMIT}\n")).unwrap();
    assert_eq!(hub.fetch(MODEL).unwrap().path, hub.snapshot());
    assert_eq!(hub.server.log(), []);
    // A link whose blob is gone is no file.
    hub.options.offline = Some("HF_HUB_OFFLINE");
    fs::remove_file(hub.snapshot().join(VAE)).unwrap();
    std::os::unix::fs::symlink("../../../blobs/gone", hub.snapshot().join(VAE)).unwrap();
    assert!(hub.error(MODEL).contains("missing: vae/"));
}

#[test]
fn the_token_goes_to_the_endpoint_alone() {
    let mut hub = Hub::of(pipeline());
    hub.options.token = Token::parse(" hf_secret\n", "test").unwrap();
    // A repository that was renamed.
    let listing = "/api/models/some/model/revision/main";
    hub.server.fail("/revision/main", Fault::Redirect(listing));
    hub.fetch(MODEL).unwrap();
    let log = hub.server.log();
    let sent = Some("Bearer hf_secret".to_owned());
    assert!(log.iter().any(|r| r.elsewhere) && log.iter().any(|r| !r.elsewhere));
    assert_eq!(log[1].path, listing);
    for request in log {
        let expected = if request.elsewhere {
            None
        } else {
            sent.clone()
        };
        assert_eq!(request.authorization, expected, "{request:?}");
    }
    assert!(!format!("{:?}", hub.options).contains("secret"));

    let bad = Token::parse("hf_a\r\nX-Evil: 1", "HF_TOKEN")
        .unwrap_err()
        .to_string();
    assert!(bad.contains("HF_TOKEN") && !bad.contains("Evil"), "{bad}");
    assert_eq!(Token::parse(" \n", "HF_TOKEN").unwrap(), None);
}

#[test]
fn redirects_lead_to_the_web_only() {
    for to in ["file:///etc/passwd", "ftp://127.0.0.1/x", "elsewhere"] {
        let hub = Hub::of(pipeline());
        hub.server.fail("/revision/main", Fault::Redirect(to));
        let error = hub.fetch(MODEL).unwrap_err();
        assert!(matches!(error, HubError::Redirect { .. }), "{to}: {error}");
    }
    let hub = Hub::of(pipeline());
    for _ in 0..20 {
        hub.server.fail(
            "/revision/main",
            Fault::Redirect("/api/models/some/model/revision/main"),
        );
    }
    assert!(hub.error(MODEL).contains("more than 8 redirects"));
}

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
    assert!(error.contains("does not answer as the hub does"), "{error}");
}

#[test]
fn refusals_are_told_apart() {
    type Case<'a> = (u16, &'a str, bool, &'a str);
    let cases: [Case<'_>; 9] = [
        (401, "", false, "for a private one set HF_TOKEN"),
        (
            401,
            "X-Error-Code: RepoNotFound\r\n",
            false,
            "for a private one set HF_TOKEN",
        ),
        (
            404,
            "X-Error-Code: RepoNotFound\r\n",
            true,
            "shows to the owner of the token",
        ),
        (
            401,
            "X-Error-Message: Invalid credentials\r\n",
            true,
            "does not take the token",
        ),
        (
            403,
            "X-Error-Message: fine-grained\r\n",
            true,
            "(it says: fine-grained)",
        ),
        (
            401,
            "X-Error-Code: GatedRepo\r\n",
            false,
            "then set HF_TOKEN",
        ),
        (
            403,
            "X-Error-Code: GatedRepo\r\n",
            true,
            "with the account that the token is of",
        ),
        (404, "", false, "has no revision 'main'"),
        (418, "", false, "answered with status 418"),
    ];
    for (status, headers, token, expected) in cases {
        let mut hub = Hub::of(pipeline());
        if token {
            hub.options.token = Token::parse("hf_secret", "").unwrap();
        }
        let headers: &'static str = headers;
        hub.server
            .fail("/revision/main", Fault::Status(status, headers));
        let error = hub.error(MODEL);
        assert!(error.contains(expected), "{status} {headers}: {error}");
        assert!(error.contains(REPO) && !error.contains("secret"), "{error}");
    }
    // The listing of a gated repository is public, its files are not.
    let hub = Hub::of(pipeline());
    let gated = "X-Error-Code: GatedRepo\r\nX-Error-Message: Access is restricted.\r\n";
    hub.server
        .fail("model_index.json", Fault::Status(401, gated));
    let error = hub.error(MODEL);
    assert!(
        error.contains("is gated: accept its terms at http://"),
        "{error}"
    );
    // A mirror that has no codes, without such a repository.
    let hub = Hub::of(pipeline());
    let repo = RepoId::parse("some/other").unwrap();
    let main = Revision::parse("main").unwrap();
    hub.server.fail("/revision/main", Fault::Status(404, ""));
    let error = fetch(&repo, &main, &MODEL, &hub.options, &mut |_| {}).unwrap_err();
    assert!(
        matches!(error, HubError::NoRepo { token: false, .. }),
        "{error}"
    );
}

#[test]
fn what_does_not_fit_on_the_disk_is_not_begun() {
    let hub = Hub::of(pipeline());
    let headers = "X-Linked-Etag: \"aa\"\r\nX-Linked-Size: 1152921504606846976\r\n";
    hub.server.fail(UNET, Fault::Header(headers));
    let error = hub.fetch(MODEL).unwrap_err();
    let HubError::DiskFull {
        needed,
        free: Some(free),
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert!(needed > free);
    assert!(error.to_string().contains("HF_HUB_CACHE"), "{error}");
    assert!(hub.server.log().iter().all(|r| !r.elsewhere));
}

#[test]
fn a_model_of_another_family_is_refused_before_its_weights() {
    let hub = Hub::of(pipeline());
    let wanted = Wanted::Model {
        expected: Some((Family::Sdxl, "base_xl.yml")),
    };
    for _ in 0..2 {
        let error = hub.error(wanted);
        assert!(
            error.contains("base_xl.yml expects SDXL; use base15.yml"),
            "{error}"
        );
    }
    assert!(hub.server.log().iter().all(|r| !r.elsewhere));
    let mut repository = pipeline();
    let flux = r#"{"_class_name": "FluxPipeline", "transformer": ["diffusers", "X"]}"#;
    repository.insert("model_index.json".to_owned(), flux.into());
    let error = Hub::of(repository).error(MODEL);
    assert!(
        error.contains("this is FLUX.1, which is not supported"),
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
        error.contains("a.safetensors, b.safetensors; fetch one"),
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

#[test]
fn two_at_once_download_a_file_once() {
    let hub = Hub::of(pipeline());
    std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| hub.fetch(MODEL).unwrap()));
        both.map(|one| assert_eq!(one.join().unwrap().path, hub.snapshot()));
    });
    assert_eq!(hub.content_requests(UNET).len(), 1);
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
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

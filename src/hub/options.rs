//! The hub's options, from the environment.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::HubError;
use super::{Result, address};
use crate::util::files;

const ENDPOINT: &str = "https://huggingface.co";
/// Any of these forbids the network.
const OFFLINE: [&str; 2] = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
/// The first one that is set has the token.
const TOKEN: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];
/// Certificates for networks that decrypt traffic; Python's tools read both.
const CERTIFICATES: [&str; 2] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"];
const CACHE: [&str; 2] = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"];

/// How the hub is reached, and where its files are kept.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Address of the hub or of a mirror, without a slash at the end.
    pub endpoint: String,
    /// The folder with a `models--organization--name` for each repository.
    pub cache: PathBuf,
    /// Sent to `endpoint` and to no other host.
    pub token: Option<Token>,
    /// The name of the variable that forbids the network, if one does.
    pub offline: Option<&'static str>,
    /// Whether `HTTPS_PROXY` and its like are followed.
    pub proxies: bool,
    /// A PEM file of the certificates to trust instead of the usual ones.
    pub certificates: Option<PathBuf>,
    /// How long to wait for a connection.
    pub connect_timeout: Duration,
    /// How long to wait for the next bytes, of an answer or of a file.
    pub read_timeout: Duration,
    /// How often in a row a request may fail without having brought a byte.
    pub attempts: u32,
    /// The wait before the second attempt; it doubles with every further one.
    pub backoff: Duration,
}

/// A secret that shows itself to no log.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a token, without white space around it; `None` for an empty one.
    ///
    /// # Errors
    /// [`HubError::Variable`] when it has letters that no token has. `origin` is where it was found.
    pub fn parse(text: &str, origin: &str) -> Result<Option<Token>> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(None);
        }
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(HubError::Variable {
                name: origin.to_owned(),
                value: "(not shown)".to_owned(),
                expected: "a token of the hub: one word of ASCII letters",
            });
        }
        Ok(Some(Token(text.to_owned())))
    }

    pub(super) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl HubOptions {
    /// Reads the variables that `huggingface_hub` reads: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`,
    /// `HF_HOME`, `XDG_CACHE_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`,
    /// `SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`.
    ///
    /// # Errors
    /// A variable or the token's file has a value that cannot be used, or there is no home directory to find the cache
    /// in.
    pub fn from_env() -> Result<HubOptions> {
        Self::from_variables(&|name| std::env::var_os(name), dirs::home_dir())
    }

    /// As [`HubOptions::from_env`], of variables that `get` gives.
    pub(super) fn from_variables(
        get: &dyn Fn(&str) -> Option<OsString>,
        home: Option<PathBuf>,
    ) -> Result<HubOptions> {
        let set = |name: &str| get(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let path = |name: &str| set(name).map(|value| expanded(value, home.as_deref()));

        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if address::web(&endpoint).is_none() {
            return Err(HubError::Variable {
                name: "HF_ENDPOINT".to_owned(),
                value: endpoint,
                expected: "an address that starts with https:// or http://",
            });
        }
        let hf_home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|dir| dir.join("huggingface")))
            .or_else(|| home.as_ref().map(|home| home.join(".cache/huggingface")));
        let cache = CACHE
            .iter()
            .find_map(|name| path(name))
            .or_else(|| hf_home.as_ref().map(|dir| dir.join("hub")))
            .ok_or(HubError::NoHome)?;
        let token = match TOKEN.iter().find_map(|name| Some((*name, text(name)?))) {
            Some((name, token)) => Token::parse(&token, name)?,
            None => {
                let file = path("HF_TOKEN_PATH").or_else(|| Some(hf_home?.join("token")));
                file.map(|file| token_of(&file)).transpose()?.flatten()
            }
        };
        let is_true = |name: &&&str| {
            let value = text(name).unwrap_or_default().to_ascii_lowercase();
            ["1", "true", "yes", "on"].contains(&value.as_str())
        };
        Ok(HubOptions {
            endpoint,
            cache,
            token,
            offline: OFFLINE.iter().find(is_true).copied(),
            proxies: true,
            certificates: CERTIFICATES.iter().find_map(|name| path(name)),
            connect_timeout: Duration::from_secs(15),
            read_timeout: Duration::from_secs(60),
            attempts: 5,
            backoff: Duration::from_secs(1),
        })
    }
}

/// The token in a file, which need not be there.
fn token_of(file: &Path) -> Result<Option<Token>> {
    match files::read_to_string(file) {
        Ok(text) => Token::parse(&text, &file.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HubError::Io {
            action: "read the token in",
            path: file.to_owned(),
            source,
        }),
    }
}

/// A path with the home directory for a `~` at its start.
fn expanded(value: OsString, home: Option<&Path>) -> PathBuf {
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

//! Addresses of the web, and texts as parts of them.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use url::Url;

/// The characters that are encoded in one part of a path: all but the unreserved characters of RFC 3986.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The characters that are encoded in a path of several parts.
const PATH: &AsciiSet = &SEGMENT.remove(b'/');

/// A text as one part of a path.
pub(super) fn segment(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// A text as the parts of a path, which its slashes separate.
pub(super) fn path(text: &str) -> String {
    utf8_percent_encode(text, PATH).to_string()
}

/// An address of a host that is asked with `https` or `http`.
pub(super) fn web(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    is_web(&url).then_some(url)
}

/// Where a redirect from `url` leads, on the web.
pub(super) fn redirected(url: &Url, location: &str) -> Option<Url> {
    url.join(location).ok().filter(is_web)
}

fn is_web(url: &Url) -> bool {
    matches!(url.scheme(), "https" | "http") && url.has_host()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_paths_are_encoded() {
        assert_eq!(segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(path("unet/a b+c~%ä.bin"), "unet/a%20b%2Bc~%25%C3%A4.bin");
    }

    #[test]
    fn redirects_are_resolved_against_where_they_come_from() {
        let from = web("https://hub.example:8443/a/b?x#y").unwrap();
        let to = |location| redirected(&from, location).map(String::from);
        for (location, expected) in [
            ("/c?d=%2F", "https://hub.example:8443/c?d=%2F"),
            ("c", "https://hub.example:8443/a/c"),
            ("../c", "https://hub.example:8443/c"),
            ("//cdn.example/c", "https://cdn.example/c"),
            ("http://cdn.example/c", "http://cdn.example/c"),
        ] {
            assert_eq!(to(location).as_deref(), Some(expected), "{location}");
        }
        for location in [
            "file:///etc/passwd",
            "ftp://127.0.0.1/x",
            "data:,x",
            "http://",
        ] {
            assert_eq!(to(location), None, "{location}");
        }
        assert_eq!(web("hub.example"), None);
    }

    #[test]
    fn hosts_differ_by_scheme_and_port_and_not_by_case() {
        let origin = |text| web(text).unwrap().origin();
        assert_eq!(
            origin("https://Hub.example/a"),
            origin("HTTPS://hub.example:443")
        );
        assert_ne!(origin("https://hub.example"), origin("http://hub.example"));
        assert_ne!(
            origin("https://hub.example"),
            origin("https://hub.example:444")
        );
    }
}

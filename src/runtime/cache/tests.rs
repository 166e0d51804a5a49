use std::os::unix::fs::PermissionsExt;

use super::*;

fn cache(max_bytes: u64) -> (tempfile::TempDir, ExecutableCache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = ExecutableCache::new(folder.path().join("made/when/needed"), max_bytes);
    (folder, cache)
}

fn key(name: &str) -> CacheKey {
    CacheKey::of(&[name.as_bytes()])
}

fn last_used(cache: &ExecutableCache, key: &CacheKey, seconds: u64) {
    let file = File::options().write(true).open(cache.path(key)).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    file.set_modified(time).unwrap();
}

#[test]
fn what_was_written_is_read() {
    let (_folder, cache) = cache(ExecutableCache::MAX_BYTES);
    assert_eq!(cache.usage().unwrap(), Usage::default());
    assert_eq!(cache.read(&key("a")).unwrap(), None);
    cache.write(&key("a"), b"program a").unwrap();
    cache.write(&key("empty"), b"").unwrap();
    assert_eq!(cache.read(&key("a")).unwrap().unwrap(), b"program a");
    assert_eq!(cache.read(&key("empty")).unwrap().unwrap(), b"");
    assert_eq!(cache.read(&key("b")).unwrap(), None);
    cache.write(&key("a"), b"again").unwrap();
    assert_eq!(cache.read(&key("a")).unwrap().unwrap(), b"again");
    let bytes = (2 * HEADER + 5) as u64;
    let expected = Usage { programs: 2, bytes };
    assert_eq!(cache.usage().unwrap(), expected);
    cache.remove(&key("a"));
    assert_eq!(cache.read(&key("a")).unwrap(), None);
}

#[test]
fn where_parts_of_a_key_end_counts() {
    assert_ne!(CacheKey::of(&[b"ab", b"c"]), CacheKey::of(&[b"a", b"bc"]));
    assert_ne!(CacheKey::of(&[b"a"]), CacheKey::of(&[b"a", b""]));
}

#[test]
fn every_changed_byte_and_every_cut_is_found() {
    let (_folder, cache) = cache(ExecutableCache::MAX_BYTES);
    let key = key("a");
    cache.write(&key, b"program").unwrap();
    let path = cache.path(&key);
    let whole = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        match cache.read(&key) {
            Err(CacheError::Damaged { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        refused(&changed);
        refused(&whole[..at]);
    }
    assert_eq!(refused(b"#!/bin/sh"), "9 bytes, expected at least 84");
    assert_eq!(
        refused(&[&whole[..], b"more"].concat()),
        "its length is another"
    );
    // The file of another key under this name.
    let other = super::tests::key("b");
    cache.write(&other, b"program").unwrap();
    let foreign = fs::read(cache.path(&other)).unwrap();
    assert_eq!(refused(&foreign), "its key is another");
}

#[test]
fn what_others_may_write_is_not_run() {
    let (_folder, cache) = cache(ExecutableCache::MAX_BYTES);
    let key = key("a");
    cache.write(&key, b"program").unwrap();
    for mode in [0o620, 0o602] {
        fs::set_permissions(cache.path(&key), fs::Permissions::from_mode(mode)).unwrap();
        match cache.read(&key) {
            Err(CacheError::NotOwn { mode: found, .. }) => assert_eq!(found, mode),
            other => panic!("{other:?}"),
        }
    }
    // Written anew it is this user's alone.
    cache.write(&key, b"program").unwrap();
    assert_eq!(cache.read(&key).unwrap().unwrap(), b"program");
}

#[test]
fn the_longest_unused_go_first() {
    let each = (HEADER + 100) as u64;
    let (_folder, cache) = cache(3 * each);
    let names = ["a", "b", "c"];
    for (at, name) in names.iter().enumerate() {
        cache.write(&key(name), &[0; 100]).unwrap();
        last_used(&cache, &key(name), 1000 + at as u64);
    }
    // Reading is using.
    cache.read(&key("a")).unwrap().unwrap();
    let unfinished = cache.dir().join(".x.a1b2c3.partial");
    fs::write(&unfinished, "").unwrap();
    let stranger = cache.dir().join("notes.txt");
    fs::write(&stranger, "").unwrap();

    cache.write(&key("d"), &[0; 100]).unwrap();
    let here = |name| cache.read(&key(name)).unwrap().is_some();
    assert_eq!(["a", "b", "c", "d"].map(here), [true, false, true, true]);
    assert!(unfinished.exists(), "another process may be writing it");
    let file = File::options().write(true).open(&unfinished).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();

    cache.write(&key("large"), &[0; 250]).unwrap();
    assert_eq!(
        ["a", "c", "d", "large"].map(here),
        [false, false, true, true]
    );
    assert!(!unfinished.exists());
    assert!(stranger.exists());
    // What is larger than all that is allowed is not kept, and costs nothing else its place.
    cache.write(&key("huge"), &[0; 4000]).unwrap();
    assert!(!here("huge") && here("large"));
}

#[test]
fn a_folder_that_cannot_be_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = ExecutableCache::new(file.join("cache"), ExecutableCache::MAX_BYTES);
    let error = cache.write(&key("a"), b"program").unwrap_err().to_string();
    assert!(error.contains("file/cache"), "{error}");
    assert!(cache.read(&key("a")).is_err());
}

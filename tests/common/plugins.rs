//! Where the plugins are that tests run against. A missing one fails the test: none is skipped.

use std::path::PathBuf;

/// The plugin of this kind (`cpu`, `tpu`) under `MAXDIFF_PLUGIN_DIR`.
pub fn plugin_path(kind: &str, file: &str) -> PathBuf {
    let root = std::env::var_os("MAXDIFF_PLUGIN_DIR").unwrap_or_else(|| {
        panic!(
            "MAXDIFF_PLUGIN_DIR is not set: install plugins with `maxdiff-rs plugin install {kind}` \
             and point it at their folder"
        )
    });
    let root = PathBuf::from(root);
    let entries = std::fs::read_dir(&root)
        .unwrap_or_else(|error| panic!("MAXDIFF_PLUGIN_DIR {}: {error}", root.display()));
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with(&format!("{kind}-"))
        })
        .map(|entry| entry.path().join(file))
        .filter(|path| path.is_file())
        .collect();
    found.sort();
    found.pop().unwrap_or_else(|| {
        panic!(
            "no {kind}-*/{file} in {}: run `maxdiff-rs plugin install {kind}`",
            root.display()
        )
    })
}

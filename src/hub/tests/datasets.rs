//! Datasets: the parquet files of a split, by the hub's list of files, at the commit that was fetched first.

use super::*;

const FIRST: &str = "data/train-00000-of-00002.parquet";
const SECOND: &str = "data/train-00001-of-00002-ab12.parquet";
const TEST: &str = "data/test-00000-of-00001.parquet";
const TRAIN: Wanted<'static> = Wanted::Dataset {
    split: "train",
    folder: "",
};

fn dataset() -> Hub {
    Hub::of(files(&[
        ("README.md", "read me"),
        (FIRST, "the first table"),
        (SECOND, "the second table"),
        (TEST, "for tests"),
    ]))
}

impl Hub {
    fn fetch_dataset(&self, wanted: Wanted<'_>) -> Result<Fetched> {
        let repo = RepoId::parse_dataset(REPO).unwrap();
        let revision = Revision::parse("main")?;
        fetch(&repo, &revision, &wanted, &self.options, &mut |_| {})
    }
}

#[test]
fn the_tables_of_a_split_are_downloaded_once() {
    let hub = dataset();
    let fetched = hub.fetch_dataset(TRAIN).unwrap();
    assert_eq!(fetched.files, [FIRST, SECOND]);
    let dir = hub
        .folder
        .path()
        .join("datasets--some--model/snapshots")
        .join(COMMIT);
    assert_eq!(fetched.path, dir);
    assert_eq!(names(&dir), [FIRST, SECOND]);
    assert_eq!(fs::read(dir.join(SECOND)).unwrap(), b"the second table");
    let paths: Vec<String> = hub
        .server
        .log()
        .into_iter()
        .map(|request| request.path)
        .collect();
    assert_eq!(paths[0], "/api/datasets/some/model/revision/main");
    assert!(
        paths[1].starts_with("/datasets/some/model/resolve/"),
        "{paths:?}"
    );
    // The list of files is asked for again, at the same commit, wherever the branch is by then.
    hub.server.state().revisions = BTreeMap::from([
        ("main".to_owned(), "f".repeat(40)),
        ("v1".to_owned(), COMMIT.to_owned()),
    ]);
    let again = hub.fetch_dataset(TRAIN).unwrap();
    assert_eq!((again.downloaded, again.path), (0, dir));
    let paths: Vec<String> = hub
        .server
        .log()
        .into_iter()
        .map(|request| request.path)
        .collect();
    assert_eq!(
        paths,
        [format!("/api/datasets/some/model/revision/{COMMIT}")]
    );
    // Another split is added.
    let folder = Wanted::Dataset {
        split: "test",
        folder: "data",
    };
    let test = hub.fetch_dataset(folder).unwrap();
    assert_eq!(test.files, [TEST]);
    assert!(test.path.ends_with("data"));
}

#[test]
fn offline_the_cache_must_have_all_tables() {
    let mut hub = dataset();
    let fetched = hub.fetch_dataset(TRAIN).unwrap();
    hub.options.offline = Some("HF_HUB_OFFLINE");
    hub.server.log();
    assert_eq!(hub.fetch_dataset(TRAIN).unwrap().files, [FIRST, SECOND]);
    fs::remove_file(fetched.path.join(SECOND)).unwrap();
    let error = hub.fetch_dataset(TRAIN).unwrap_err().to_string();
    assert!(
        error.contains("missing: data/train-00001-of-00002*.parquet")
            && error.contains("HF_HUB_OFFLINE forbids"),
        "{error}"
    );
    assert_eq!(hub.server.log(), []);
}

#[test]
fn what_is_no_table_is_told() {
    let error = |hub: &Hub, wanted| hub.fetch_dataset(wanted).unwrap_err().to_string();
    let pictures = Hub::of(files(&[("a.jpg", "a picture")]));
    let found = error(&pictures, TRAIN);
    assert!(
        found.contains("a.jpg") && found.contains("refs/convert/parquet"),
        "{found}"
    );
    let other = Wanted::Dataset {
        split: "validation",
        folder: "",
    };
    let found = error(&dataset(), other);
    assert!(
        found.contains("no file of the split validation") && found.contains(TEST),
        "{found}"
    );
    let hub = dataset();
    hub.server.fail(FIRST, Fault::Corrupt);
    let found = error(&hub, TRAIN);
    assert!(found.contains("SHA-256"), "{found}");
}

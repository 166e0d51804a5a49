//! The datasets that `examples/shapes_dataset.rs` writes, read back.

#[path = "../examples/shapes_dataset.rs"]
#[allow(dead_code, reason = "its `main` is not called")]
mod shapes_dataset;

use maxdiff::data::{Dataset, Folder, FolderOptions, Layout, Shapes, ShapesOptions, TableOptions};

/// Parquet files and archives of a thousand pictures each have the samples in their order, and decode them when they are asked
/// for: nothing of them is kept.
#[test]
fn tables_and_archives_have_the_samples_in_order() {
    let shapes = Shapes::new(ShapesOptions {
        count: 1020,
        resolution: 16,
        ..ShapesOptions::default()
    })
    .unwrap();
    let dir = tempfile::tempdir().unwrap();
    shapes_dataset::write_dataset(dir.path(), &shapes).unwrap();
    let tables = Layout::Tables(TableOptions {
        image_column: "image".to_owned(),
        caption_column: "text".to_owned(),
        split: "train".to_owned(),
        files: None,
    });
    for (folder, layout) in [("tables", tables), ("archives", Layout::Tars)] {
        let files = std::fs::read_dir(dir.path().join(folder)).unwrap().count();
        assert_eq!(files, 2, "{folder}");
        let options = FolderOptions {
            layout,
            cache_bytes: 0,
            ..FolderOptions::new(dir.path().join(folder), 16)
        };
        let first = FolderOptions {
            max_images: Some(3),
            ..options.clone()
        };
        assert_eq!(Folder::open(first).unwrap().count(), 3);
        let too_many = FolderOptions {
            max_images: Some(1021),
            ..options.clone()
        };
        let error = Folder::open(too_many).unwrap_err().to_string();
        assert!(
            error.contains("max_train_samples=1021") && error.contains("at most 1020"),
            "{error}"
        );
        let dataset = Dataset::Folder(Box::new(Folder::open(options).unwrap()));
        assert_eq!(dataset.len(), 1020);
        for index in [0, 99, 100, 777, 1019] {
            assert_eq!(
                dataset.get(index).unwrap(),
                shapes.get(index),
                "{folder} {index}"
            );
        }
    }
}

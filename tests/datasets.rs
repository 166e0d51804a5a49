//! The datasets that `examples/shapes_dataset.rs` writes, read back, and TFRecord files of TensorFlow.

#[path = "../examples/shapes_dataset.rs"]
#[allow(dead_code, reason = "its `main` is not called")]
pub mod shapes_dataset;

use maxdiff::data::{
    DataError, Dataset, Folder, FolderOptions, Layout, RecordOptions, Shapes, ShapesOptions,
    TableOptions,
};

use crate::common::golden;

fn records(image: &str, caption: &str) -> Layout {
    Layout::Records(RecordOptions {
        image_feature: image.to_owned(),
        caption_feature: caption.to_owned(),
    })
}

/// Parquet files, archives and TFRecord files of a thousand pictures each have the samples in their order, and decode them when they are asked
/// for: nothing of them is kept.
#[test]
fn tables_archives_and_records_have_the_samples_in_order() {
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
    for (folder, layout) in [
        ("tables", tables),
        ("archives", Layout::Tars),
        ("records", records("image", "text")),
    ] {
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

#[test]
fn tfrecord_files_of_tensorflow_are_read() {
    let open = |name: &str| -> Result<Folder, DataError> {
        Folder::open(FolderOptions {
            layout: records("image/encoded", "caption"),
            cache_bytes: 0,
            ..FolderOptions::new(golden("tfrecord").join(name), 8)
        })
    };
    let folder = open("pictures").unwrap();
    let samples = [0, 1].map(|at| folder.get(at).unwrap());
    assert_eq!(samples[0].captions, ["a first picture, gr\u{f6}\u{df}er"]);
    assert_eq!(samples[1].captions, ["a second", "the same again"]);
    // The square in the middle begins in the third column.
    for (sample, off) in samples.iter().zip([0, 40]) {
        for (at, pixel) in sample.pixels.chunks_exact(3).enumerate() {
            let expected = [(at % 8 + 2) * 20, at / 8 * 30, 7];
            let found = pixel.iter().zip(expected);
            for (found, expected) in found {
                assert!(
                    usize::from(*found).abs_diff(expected) <= off,
                    "{at} {pixel:?}"
                );
            }
        }
    }
    let message = |name: &str| open(name).unwrap_err().to_string();
    let error = message("prepared");
    assert!(
        error.contains("file_00-1000.tfrec: the record at byte 0: it holds latents and text")
            && error.contains("(clip_embeddings, moments)"),
        "{error}"
    );
    let error = message("packed");
    assert!(
        error.contains("train.tfrecord: the record at byte 0: the file is compressed"),
        "{error}"
    );
}

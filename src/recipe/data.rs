//! Dataset and tokenizer of a configuration.

use std::path::{Path, PathBuf};

use crate::config::{Config, DatasetType, MaskedLoss, OneOrMore};
use crate::data::shapes::{OtherWords, ShapeWord, WordFilter};
use crate::data::{
    BucketOptions, Buckets, Crop, Dataset, Folder, FolderOptions, Layout, Masks, RecordOptions,
    Shapes, ShapesOptions, Sizes, Split, TableOptions, TagOrders, Tokenizer, word_level_json,
};
use crate::train::KNOWN_FILES;
use crate::util::files;

use super::fine_tune::{cache_folder, class_folder};
use super::model::trains_pixels;
use super::{Notice, Notify, RecipeError, hub};

/// Opens the training split of the configured dataset.
///
/// # Errors
/// When the dataset type is not here, or the data cannot be read.
pub fn dataset(config: &Config, notify: &mut Notify<'_>) -> Result<Dataset, RecipeError> {
    if !config.instance_data_dir.is_empty() {
        return dreambooth(config);
    }
    if config.dataset_type == DatasetType::Shapes {
        return Ok(Dataset::Shapes(shapes(config, Split::Train)?));
    }
    let Some(layout) = layout(config) else {
        return Err(RecipeError::Usage(format!(
            "dataset_type={}: not here yet; supported: shapes, folder, webdataset, hf, tfrecord",
            config.dataset_type
        )));
    };
    let mix = &config.train_data_mix.0;
    let folder = if !mix.is_empty() {
        mixed(config, &layout, notify)?
    } else if config.train_data_dir.is_empty() && matches!(layout, Layout::Tables(_)) {
        let (folder, files) = hub::find_dataset(config, notify)?;
        let mut options = folder_options(config, &folder)?;
        options.max_images = most_samples(config);
        options.layout = Layout::Tables(tables(config, Some(files)));
        Folder::open(options).map_err(RecipeError::failed)?
    } else {
        let dir = &config.train_data_dir;
        let mut options = given_folder(config, "train_data_dir=", dir, &layout)?;
        options.max_images = most_samples(config);
        Folder::open(options).map_err(RecipeError::failed)?
    };
    folder.check_masks().map_err(RecipeError::failed)?;
    Ok(Dataset::Folder(Box::new(folder)))
}

/// The folders of `train_data_mix` as one.
fn mixed(config: &Config, layout: &Layout, notify: &mut Notify<'_>) -> Result<Folder, RecipeError> {
    let mix = &config.train_data_mix.0;
    let mut parts = Vec::with_capacity(mix.len());
    for (dir, weight) in mix {
        let mut options = given_folder(config, "train_data_mix: ", dir, layout)?;
        options.cache_bytes /= mix.len() as u64;
        let folder = Folder::open(options).map_err(RecipeError::failed)?;
        parts.push((folder, *weight));
    }
    let (folder, shares) = Folder::mixed(parts).map_err(RecipeError::failed)?;
    for ((dir, weight), share) in mix.iter().zip(shares) {
        notify(Notice::Note(&format!(
            "train_data_mix: {dir}: weight {weight}, pictures {}, repeats {}, {:.1} % of the samples",
            share.images,
            share.repeats,
            share.share * 100.0
        )));
    }
    Ok(folder)
}

/// The options of a folder that is given by its path; `key` is what stands before it.
fn given_folder(
    config: &Config,
    key: &str,
    dir: &str,
    layout: &Layout,
) -> Result<FolderOptions, RecipeError> {
    let path = Path::new(dir);
    let is_there = path.is_dir() || matches!(layout, Layout::Tables(_)) && path.is_file();
    if !is_there {
        let holds = match layout {
            Layout::Files => {
                "images with .txt captions or a metadata.jsonl (scripts/emoji_dataset makes one)"
            }
            Layout::Tars => ".tar files",
            Layout::Tables(_) => ".parquet files",
            Layout::Records(_) => ".tfrecord or .tfrec files",
        };
        return Err(RecipeError::Usage(format!(
            "{key}{dir}: no such folder; it should hold {holds}"
        )));
    }
    let options = folder_options(config, path)?;
    Ok(FolderOptions {
        layout: layout.clone(),
        ..options
    })
}

/// How the folders of the configured dataset hold pictures; `None` where it is none of folders.
fn layout(config: &Config) -> Option<Layout> {
    match config.dataset_type {
        DatasetType::Folder => Some(Layout::Files),
        DatasetType::Webdataset => Some(Layout::Tars),
        DatasetType::Hf => Some(Layout::Tables(tables(config, None))),
        DatasetType::Tfrecord => Some(Layout::Records(RecordOptions {
            image_feature: config.image_column.clone(),
            caption_feature: config.caption_column.clone(),
        })),
        DatasetType::Shapes | DatasetType::Tf | DatasetType::Grain | DatasetType::Synthetic => None,
    }
}

/// The columns of tables, of all files of the split or of `files`.
fn tables(config: &Config, files: Option<Vec<PathBuf>>) -> TableOptions {
    TableOptions {
        image_column: config.image_column.clone(),
        caption_column: config.caption_column.clone(),
        split: config.train_split.clone(),
        files,
    }
}

/// How a folder of images is read.
fn folder_options(config: &Config, root: &Path) -> Result<FolderOptions, RecipeError> {
    let mut options = FolderOptions::new(root, config.resolution as usize);
    options.max_bad_image_fraction = config.max_bad_image_fraction;
    if !config.center_crop {
        let seed = config.seed.0;
        options.framing.crop = Crop::Random { seed };
    }
    if config.enable_bucket {
        options.framing.sizes = Sizes::Buckets(buckets(config)?);
    }
    options.folder_repeats = config.folder_repeats;
    options.masks = masks(config)?;
    if !trains_pixels(config) {
        // Pixels are encoded once, and not needed afterwards.
        options.cache_bytes = 0;
        options.known = Some(cache_folder(config).join(KNOWN_FILES));
    }
    Ok(options)
}

/// Where pictures have their masks.
fn masks(config: &Config) -> Result<Masks, RecipeError> {
    let dir = Path::new(&config.conditioning_data_dir);
    match config.masked_loss {
        MaskedLoss::None => Ok(Masks::None),
        MaskedLoss::Alpha => Ok(Masks::Alpha),
        MaskedLoss::Folder if dir.is_dir() => Ok(Masks::Folder(dir.to_owned())),
        MaskedLoss::Folder => Err(RecipeError::Usage(format!(
            "conditioning_data_dir={}: no such folder; it should hold a mask with the name of each picture",
            dir.display()
        ))),
    }
}

/// The orders of the tags of captions, if they change.
///
/// # Errors
/// When no caption has tags that change their places.
pub(super) fn tag_orders(
    config: &Config,
    dataset: &Dataset,
) -> Result<Option<TagOrders>, RecipeError> {
    if config.caption_shuffles == 0 {
        return Ok(None);
    }
    let tags = TagOrders {
        seed: config.seed.0,
        count: config.caption_shuffles as usize,
        keep: config.keep_tokens as usize,
        dropout: config.caption_tag_dropout_rate,
    };
    for index in 0..dataset.len() {
        let (captions, _) = dataset.entry(index).map_err(RecipeError::failed)?;
        if captions.iter().any(|caption| tags.changes(caption)) {
            return Ok(Some(tags));
        }
    }
    let (captions, _) = dataset.entry(0).map_err(RecipeError::failed)?;
    Err(RecipeError::Usage(format!(
        "caption_shuffles={}: no caption has several tags between commas after the first keep_tokens={}, so nothing changes; the \
         first caption is '{}'",
        config.caption_shuffles, config.keep_tokens, captions[0]
    )))
}

/// Pictures of one thing, and of its class if prior preservation is asked for.
fn dreambooth(config: &Config) -> Result<Dataset, RecipeError> {
    let mut folder = subject(config)?;
    if config.with_prior_preservation {
        let dir = class_folder(config);
        let mut classes = prompted(config, "class_data_dir", &dir, &config.class_prompt)?;
        // All of a class picture counts.
        classes.masks = Masks::None;
        let classes = Folder::open(classes).map_err(RecipeError::failed)?;
        folder = folder.with_class_images(classes, config.num_class_images as usize);
    }
    Ok(Dataset::Folder(Box::new(folder)))
}

/// DreamBooth's pictures of the subject, without those of its class.
///
/// # Errors
/// When the folder is not there, or a picture has neither a caption nor a mask that it needs.
pub(super) fn subject(config: &Config) -> Result<Folder, RecipeError> {
    let dir = Path::new(&config.instance_data_dir);
    let mut options = prompted(config, "instance_data_dir", dir, &config.instance_prompt)?;
    options.max_images = most_samples(config);
    let folder = Folder::open(options).map_err(RecipeError::failed)?;
    folder.check_masks().map_err(RecipeError::failed)?;
    Ok(folder)
}

/// How a folder is read whose pictures have `prompt` where they have no caption of their own.
fn prompted(
    config: &Config,
    key: &str,
    dir: &Path,
    prompt: &str,
) -> Result<FolderOptions, RecipeError> {
    if !dir.is_dir() {
        let dir = dir.display();
        return Err(RecipeError::Usage(format!("{key}={dir}: no such folder")));
    }
    let mut options = folder_options(config, dir)?;
    options.caption = Some(prompt.to_owned()).filter(|prompt| !prompt.is_empty());
    Ok(options)
}

fn buckets(config: &Config) -> Result<Buckets, RecipeError> {
    let (resolution, steps) = (config.resolution, config.bucket_reso_steps);
    let half = (resolution / 2).max(steps);
    let options = BucketOptions {
        resolution: resolution as usize,
        min_side: config.min_bucket_reso.unwrap_or(half) as usize,
        max_side: config.max_bucket_reso.unwrap_or(resolution * 2) as usize,
        steps: steps as usize,
    };
    Buckets::new(options).map_err(RecipeError::usage)
}

fn shapes(config: &Config, split: Split) -> Result<Shapes, RecipeError> {
    let options = ShapesOptions::default();
    let words = |asked: &Option<OneOrMore<ShapeWord>>| match asked {
        Some(OneOrMore(words)) => words.clone(),
        None => Vec::new(),
    };
    Shapes::new(ShapesOptions {
        seed: config.seed.0,
        resolution: config.resolution as usize,
        count: most_samples(config).unwrap_or(options.count),
        max_objects: config.max_objects as usize,
        position_spread: config.position_spread,
        validation_fraction: config.validation_fraction,
        split,
        filter: WordFilter {
            without: words(&config.shapes_without),
            with: words(&config.shapes_with),
        },
        words: shape_words(config)?,
    })
    .map_err(RecipeError::usage)
}

/// How many samples of the dataset are used, if not all.
fn most_samples(config: &Config) -> Option<usize> {
    usize::try_from(config.max_train_samples).ok()
}

/// The words of captions of `dataset_type=shapes`.
///
/// # Errors
/// When a word cannot stand for another.
pub fn shape_words(config: &Config) -> Result<OtherWords, RecipeError> {
    OtherWords::new(config.shapes_words.0.clone()).map_err(RecipeError::usage)
}

/// The captions that `held_out_prompts` asks for.
///
/// # Errors
/// When nothing is held out.
pub fn held_out_prompts(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<Vec<String>, RecipeError> {
    let wanted = config.held_out_prompts as usize;
    let prompts = shapes(config, Split::Validation)?.held_out_prompts(wanted);
    if prompts.len() < wanted {
        notify(Notice::Warning(&format!(
            "held_out_prompts={wanted}: validation_fraction={} of captions of up to {} shapes holds {}",
            config.validation_fraction,
            config.max_objects,
            prompts.len()
        )));
    }
    Ok(prompts)
}

/// The tokenizer as the text of a `tokenizer.json`: that of the configuration, or one built from the captions.
///
/// # Errors
/// When the file cannot be read, or there are no captions.
pub fn tokenizer_json(config: &Config, dataset: &Dataset) -> Result<String, RecipeError> {
    if config.tokenizer_model_name_or_path.is_empty() {
        let captions = dataset.vocabulary_captions();
        return word_level_json(captions.iter().map(String::as_str)).map_err(RecipeError::failed);
    }
    let given = Path::new(&config.tokenizer_model_name_or_path);
    let path = if given.is_dir() {
        given.join("tokenizer.json")
    } else {
        given.to_path_buf()
    };
    files::read_to_string(&path).map_err(|e| {
        RecipeError::Usage(format!(
            "tokenizer_model_name_or_path: {}: {e}",
            path.display()
        ))
    })
}

/// The tokenizer, where the text encoder's configuration leaves `vocab_size` to it.
///
/// # Errors
/// When the tokenizer is needed and cannot be made.
pub fn tokenizer_for_vocab_size(config: &Config) -> Result<Option<Tokenizer>, RecipeError> {
    let needed = config.train_text_encoder
        && config
            .text_encoder_config_json()?
            .is_some_and(|fields| !fields.contains_key("vocab_size"));
    if !needed {
        return Ok(None);
    }
    let dataset = dataset(config, &mut |_| {})?;
    let json = tokenizer_json(config, &dataset)?;
    let tokenizer = Tokenizer::from_json(&json, usize::MAX).map_err(RecipeError::failed)?;
    Ok(Some(tokenizer))
}

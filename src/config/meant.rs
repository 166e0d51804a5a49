//! The keys that people mean by the names of other programs.

/// The key of a name that other programs have for it; with more than one key, as a sentence has them.
const MEANT: &[(&[&str], &str)] = &[
    (
        &["steps", "num_steps", "sampling_steps"],
        "num_inference_steps, or max_train_steps",
    ),
    (&["cfg", "cfg_scale", "guidance"], "guidance_scale"),
    (&["sampler", "sampler_name"], "scheduler"),
    (&["negative", "neg_prompt"], "negative_prompt"),
    (
        &["n", "num_images", "count", "n_iter"],
        "num_images_per_prompt",
    ),
    (&["size", "image_size"], "width and height"),
    (&["w", "W"], "width"),
    (&["h", "H"], "height"),
    (
        &["model", "model_id", "checkpoint", "ckpt"],
        "pretrained_model_name_or_path",
    ),
    (&["out", "output", "outdir", "output_path"], "output_dir"),
    (&["lora", "loras"], "lora_config.lora_model_name_or_path"),
    (&["controlnet"], "controlnet_model_name_or_path"),
    (&["control_image"], "controlnet_image"),
    (&["refiner"], "refiner_model_name_or_path"),
    (&["denoise", "denoising_strength", "denoising"], "strength"),
    (&["init_image", "input_image"], "image"),
    (&["mask"], "mask_image"),
    (
        &[
            "ip_adapter",
            "ip_adapter_model_name_or_path",
            "ip_adapter_weight_name",
        ],
        "ip_adapter_path",
    ),
    (
        &["ip_adapter_strength", "ip_adapter_weight"],
        "ip_adapter_scale",
    ),
    (
        &[
            "hr_scale",
            "hires_upscale",
            "enable_hr",
            "hires",
            "hires_fix",
        ],
        "hires_scale",
    ),
    (&["hr_upscaler"], "hires_upscaler"),
    (&["hr_second_pass_steps"], "hires_steps"),
    (
        &["hires_denoise", "hires_denoising_strength"],
        "hires_strength",
    ),
    (&["lr"], "learning_rate"),
    (&["batch", "batch_size"], "per_device_batch_size"),
    (&["dtype"], "weights_dtype and activations_dtype"),
    (&["device"], "hardware"),
];

/// What a name that is no key means.
pub fn meant(name: &str) -> Option<&'static str> {
    let mut all = MEANT.iter();
    let (_, key) = all.find(|(names, _)| names.contains(&name))?;
    Some(key)
}

/// What to write instead of a word of the command line that is not `key=value`.
pub(super) fn advice(word: &str) -> String {
    let sides = word.split_once(['x', 'X', '*']);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match sides {
        Some((width, height)) if is_number(width) && is_number(height) => {
            return format!("; a size is width={width} height={height}");
        }
        _ => {}
    }
    if word.ends_with(".yml") || word.ends_with(".yaml") {
        return "; the configuration file comes first, and there is one".to_owned();
    }
    if word.contains(' ') {
        return format!("; a prompt is prompt='{word}'");
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::names;

    #[test]
    fn the_keys_that_are_meant_exist() {
        for (others, keys) in MEANT {
            for key in keys.split(", or ").flat_map(|keys| keys.split(" and ")) {
                let key = key.split('.').next().unwrap_or(key);
                assert!(names().contains(&key), "{key}");
            }
            assert!(!others.iter().any(|other| names().contains(other)));
        }
    }
}

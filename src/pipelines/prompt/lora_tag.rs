//! LoRAs in prompts, as web interfaces write them: `<lora:name:0.8>`.

use super::PromptError;

const OPEN: &str = "<lora:";

/// A LoRA that a prompt names.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraTag {
    pub name: String,
    pub scale: f64,
}

/// A prompt without its LoRAs, and those. `<lora:name>` has the scale 1; what is not closed is text.
///
/// # Errors
/// [`PromptError::Lora`] for a tag without a name, or whose scale is not one number.
pub fn split_lora_tags(prompt: &str) -> Result<(String, Vec<LoraTag>), PromptError> {
    let mut text = String::new();
    let mut tags = Vec::new();
    let mut rest = prompt;
    while let Some(start) = rest.find(OPEN) {
        let Some(length) = rest[start..].find('>') else {
            break;
        };
        let inside = &rest[start + OPEN.len()..start + length];
        let (name, scale) = inside.split_once(':').unwrap_or((inside, "1"));
        let scale = scale.trim().parse().ok().filter(|s: &f64| s.is_finite());
        let name = name.trim().to_owned();
        let (Some(scale), false) = (scale, name.is_empty()) else {
            let tag = rest[start..=start + length].to_owned();
            return Err(PromptError::Lora { tag });
        };
        tags.push(LoraTag { name, scale });
        text.push_str(&rest[..start]);
        rest = &rest[start + length + 1..];
    }
    text.push_str(rest);
    Ok((text, tags))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_taken_out_of_the_text() {
        let (text, tags) = split_lora_tags("a <lora:ink:0.8>cat<lora:my style >, <lora:x").unwrap();
        assert_eq!(text, "a cat, <lora:x");
        let tag = |name: &str, scale| LoraTag {
            name: name.to_owned(),
            scale,
        };
        assert_eq!(tags, [tag("ink", 0.8), tag("my style", 1.0)]);
        for wrong in ["<lora::1>", "<lora:ink:strong>", "<lora:ink:0.8:0.5>"] {
            let error = split_lora_tags(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}

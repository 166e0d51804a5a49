//! `clip_skip`: last layers of text encoders that are left out.

use crate::config::Config;
use crate::models::{Family, HiddenState, Part, TextEncoderKind};

use super::RecipeError;

/// The layers that `clip_skip` leaves out of each text encoder of the family. A list has an entry for each of SDXL's
/// two.
pub(super) fn clip_skips(config: &Config, family: Family) -> Result<Vec<usize>, RecipeError> {
    let encoders = family.spec().text_encoders;
    let clips = encoders.iter().filter(|e| e.kind == TextEncoderKind::Clip);
    let place = |part: Part| usize::from(part == Part::TextEncoder2);
    let entries = clips.map(|encoder| place(encoder.part) + 1);
    let (expected, found) = (entries.max().unwrap_or(1), config.clip_skip.0.len());
    if ![1, expected].contains(&found) {
        return Err(RecipeError::Usage(format!(
            "clip_skip has {found} entries; expected 1{} for {}",
            if expected == 2 { " or 2" } else { "" },
            family.title()
        )));
    }
    let skip = |part: Part| config.clip_skip.get(place(part)).copied().unwrap_or(0);
    let takes_pooled = encoders.iter().any(|e| e.hidden == HiddenState::Pooled);
    if takes_pooled && config.clip_skip.0.iter().any(|s| *s > 0) {
        return Err(RecipeError::Usage(format!(
            "clip_skip has no effect: {} takes CLIP's pooled output, which comes after its last layer; leave it out",
            family.title()
        )));
    }
    let skips = encoders.iter().map(|encoder| match encoder.kind {
        TextEncoderKind::Clip => skip(encoder.part) as usize,
        TextEncoderKind::T5 { .. } => 0,
    });
    Ok(skips.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_encoder_has_its_clip_skip() {
        let skips = |entries: &[u64], family| {
            let mut config = Config::default();
            config.clip_skip.0 = entries.to_vec();
            clip_skips(&config, family).map_err(|error| error.to_string())
        };
        assert_eq!(skips(&[2], Family::Sdxl).unwrap(), [2, 2]);
        assert_eq!(skips(&[2, 1], Family::Sdxl).unwrap(), [2, 1]);
        assert_eq!(skips(&[2, 1], Family::SdxlRefiner).unwrap(), [1]);
        assert_eq!(skips(&[1], Family::Sd1).unwrap(), [1]);
        let error = skips(&[2, 1], Family::Sd1).unwrap_err();
        assert!(
            error.contains("clip_skip has 2 entries; expected 1 for "),
            "{error}"
        );
    }
}

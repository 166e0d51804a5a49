//! The recipes inside the program: the files of `configs/`, by name.

use std::path::Path;

use crate::util::names::nearest;

/// A configuration inside the program.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub name: &'static str,
    /// Its YAML file.
    pub text: &'static str,
}

macro_rules! recipes {
    ($($name:literal: $file:literal),* $(,)?) => {
        &[$(Recipe { name: $name, text: include_str!(concat!("../../configs/", $file)) }),*]
    };
}

/// All recipes, by family.
pub const RECIPES: &[Recipe] = recipes! {
    "quickstart": "quickstart.yml",
    "shapes": "shapes.yml",
    "emoji": "emoji.yml",
    "sd14": "base14.yml",
    "sd15": "base15.yml",
    "sd21": "base21.yml",
    "sdxl": "base_xl.yml",
    "sdxl-refiner": "refiner_xl.yml",
    "sdxl-lightning": "base_xl_lightning.yml",
    "sdxl-lcm": "base_xl_lcm.yml",
    "sdxl-turbo": "sdxl_turbo.yml",
    "sd3": "base_sd3.yml",
    "sd35-medium": "base_sd35_medium.yml",
    "sd35-large": "base_sd35_large.yml",
    "sd35-large-turbo": "sd35_large_turbo.yml",
    "flux-dev": "base_flux_dev.yml",
    "flux-schnell": "base_flux_schnell.yml",
    "pixart-alpha": "pixart_alpha.yml",
    "pixart-sigma": "pixart_sigma.yml",
};

impl Recipe {
    /// The recipe called `name`.
    pub fn named(name: &str) -> Option<&'static Recipe> {
        RECIPES.iter().find(|recipe| recipe.name == name)
    }

    /// The recipe that stands in the place of a file: a folder or a file of that name is `./name`.
    pub(super) fn in_place_of(path: &Path) -> Option<&'static Recipe> {
        Recipe::named(path.to_str()?)
    }

    /// What it is, from the first line of its file.
    pub fn about(&self) -> &'static str {
        let line = self.text.lines().next().unwrap_or_default();
        let line = line.trim_start_matches(['#', ' ']);
        let line = line.split_once(". ").map_or(line, |(sentence, _)| sentence);
        line.split(':').next().unwrap_or(line).trim_end_matches('.')
    }

    /// What to say of a name that no recipe has.
    pub fn advice(name: &str) -> String {
        let names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
        let meant = nearest(name, names.iter().copied());
        let meant = meant.map_or_else(String::new, |meant| format!("; did you mean {meant}?"));
        format!("recipes in this program: {}{meant}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;
    use crate::config::Config;

    #[test]
    fn every_file_has_one_name_and_loads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        let files = fs::read_dir(folder).unwrap();
        let files: BTreeSet<String> = files
            .map(|file| fs::read_to_string(file.unwrap().path()).unwrap())
            .collect();
        let texts = RECIPES.iter().map(|recipe| recipe.text.to_owned());
        assert_eq!(texts.collect::<BTreeSet<_>>(), files);
        for recipe in RECIPES {
            let loaded = Config::load(Path::new(recipe.name), &[], None);
            assert!(loaded.is_ok(), "{}: {:?}", recipe.name, loaded.err());
            assert!(!recipe.about().is_empty(), "{}", recipe.name);
        }
        assert_eq!(
            Recipe::named("sd15").unwrap().about(),
            "Stable Diffusion 1.5 at 512x512, with MaxDiffusion's keys"
        );
    }
}

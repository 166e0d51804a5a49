//! The text `parameters`, which AUTOMATIC1111's web interface writes into images and many programs read.

use crate::schedulers::SchedulerKind;

use super::super::upscaler::HiresUpscaler;
use super::settings::GenerationSettings;
use super::web_sampler::{KNOWN, has_schedule};

/// Prefix of the options that say how a sampler works.
const CONFIG: &str = "diffusion_scheduler_config";
/// The start of the second part of the text.
const NEGATIVE: &str = "Negative prompt:";

/// Web interfaces' denoising strength of a hi-res fix.
const WEB_STRENGTH: f64 = 0.7;
/// Most steps of a schedule.
const MOST_STEPS: f64 = 1000.0;

/// What the text says of a hi-res fix, and of image to image, which has a strength alone.
#[derive(Default)]
struct WebHires {
    scale: Option<f64>,
    steps: Option<u32>,
    strength: Option<f64>,
    upscaler: Option<String>,
}

/// The contents of the text `parameters`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WebSettings {
    /// `scheduler` is empty where [`WebSettings::unknown_sampler`] is not.
    pub settings: GenerationSettings,
    /// The name of a sampler that is not here.
    pub unknown_sampler: Option<String>,
    /// Settings that are ignored, with the reason if there is one.
    pub unused: Vec<String>,
}

impl WebSettings {
    /// The names of samplers that are known.
    pub fn samplers() -> String {
        KNOWN.map(|known| known.name).join(", ")
    }

    /// Reads the text of an image of this size.
    ///
    /// # Errors
    /// Says what is missing or not a number.
    pub(super) fn read(text: &str, size: (u32, u32)) -> Result<Self, String> {
        let (body, line) = match text.trim().rsplit_once('\n') {
            Some((body, line)) => (body, line),
            None => ("", text.trim()),
        };
        let mut read = WebSettings::default();
        let settings = &mut read.settings;
        let mut is_negative = false;
        for line in body.lines().map(str::trim) {
            let mut line = line;
            if let Some(rest) = line.strip_prefix(NEGATIVE) {
                is_negative = true;
                line = rest.trim();
            }
            let to = match is_negative {
                true => &mut settings.negative_prompt,
                false => &mut settings.prompt,
            };
            if !to.is_empty() {
                to.push('\n');
            }
            to.push_str(line);
        }
        (settings.width, settings.height) = size;
        let (mut sampler, mut schedule) = (String::new(), String::new());
        let mut hires = WebHires::default();
        let mut missing = vec!["Seed", "CFG scale", "Sampler", "Steps"];
        for (key, value) in fields(line) {
            missing.retain(|name| *name != key);
            let number = |what: &str| format!("`{key}` is '{value}'; expected {what}");
            match key {
                "Steps" => settings.steps = value.parse().map_err(|_| number("a number"))?,
                "Seed" => settings.seed = value.parse().map_err(|_| number("a number"))?,
                "CFG scale" => {
                    settings.guidance_scale = value.parse().map_err(|_| number("a number"))?;
                }
                "Sampler" => sampler = value,
                "Schedule type" => schedule = value,
                "Hires upscale" => {
                    hires.scale = Some(value.parse().map_err(|_| number("a number"))?);
                }
                "Hires steps" => {
                    hires.steps = Some(value.parse().map_err(|_| number("a number"))?);
                }
                "Hires upscaler" => hires.upscaler = Some(value),
                "Denoising strength" => {
                    hires.strength = Some(value.parse().map_err(|_| number("a number"))?);
                }
                "Size" => {
                    let sides = value.split_once('x');
                    let sides = sides.and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
                    (settings.width, settings.height) =
                        sides.ok_or_else(|| number("a size such as 512x768"))?;
                }
                "Model" => settings.model = value,
                "Model hash" => settings.model_hash = Some(value),
                "Version" => {}
                "Clip skip" if value == "1" => {}
                "Clip skip" => read.unused.push(format!(
                    "Clip skip: {value} (counts from 1: give clip_skip, which counts from 0, for Stable Diffusion 1.x or 2.x)"
                )),
                _ => read.unused.push(format!("{key}: {value}")),
            }
        }
        if let Some(name) = missing.pop() {
            return Err(format!("`{name}` is missing"));
        }
        read.set_sampler(&sampler, &schedule);
        read.set_hires(hires);
        Ok(read)
    }

    /// Takes the second pass of a hi-res fix. Its steps are those that run: the schedule has more of them by the
    /// strength.
    fn set_hires(&mut self, hires: WebHires) {
        let strength = hires.strength.unwrap_or(WEB_STRENGTH);
        let scale = hires.scale.filter(|scale| *scale > 1.0 && strength > 0.0);
        let Some(scale) = scale else {
            let number = |name: &str, value: f64| format!("{name}: {value}");
            let ignored = [
                hires.strength.map(|v| number("Denoising strength", v)),
                hires.scale.map(|v| number("Hires upscale", v)),
                hires.steps.map(|v| number("Hires steps", f64::from(v))),
                hires.upscaler.map(|v| format!("Hires upscaler: {v}")),
            ];
            self.unused.extend(ignored.into_iter().flatten());
            return;
        };
        let run = match hires.steps {
            None | Some(0) => self.settings.steps,
            Some(steps) => steps,
        };
        let name = hires.upscaler.unwrap_or_default();
        let upscaler = match name.as_str() {
            "" => HiresUpscaler::Latent,
            name => HiresUpscaler::from_name(name).unwrap_or_else(|| {
                let other = HiresUpscaler::Lanczos;
                self.unused.push(format!(
                    "Hires upscaler: {name} (not here; {other} enlarges the image)"
                ));
                other
            }),
        };
        let steps = (f64::from(run) / strength).ceil().min(MOST_STEPS);
        for (key, value) in [
            ("hires_scale", scale.to_string()),
            ("hires_strength", strength.to_string()),
            ("hires_steps", steps.to_string()),
            ("hires_upscaler", upscaler.name().to_owned()),
        ] {
            self.settings.options.insert(key.to_owned(), value);
        }
    }

    /// Takes the sampler by its name, which in older versions ends with the schedule type.
    fn set_sampler(&mut self, sampler: &str, schedule: &str) {
        let (name, suffix) = ["Karras", "Exponential"]
            .into_iter()
            .find_map(|suffix| Some((sampler.strip_suffix(suffix)?.strip_suffix(' ')?, suffix)))
            .unwrap_or((sampler, ""));
        let known = KNOWN.iter().find(|k| k.name.eq_ignore_ascii_case(name));
        // Images of older versions of this program have the names of diffusers' classes.
        let kind = known
            .map(|known| known.kind)
            .or_else(|| SchedulerKind::from_name(name));
        let Some(kind) = kind else {
            self.unknown_sampler = Some(sampler.to_owned());
            return;
        };
        self.settings.scheduler = kind.class_name().to_owned();
        let mut set = |key: &str, value: &str| {
            let key = format!("{CONFIG}.{key}");
            self.settings.options.insert(key, value.to_owned());
        };
        if let Some((algorithm, order)) = known.and_then(|known| known.solver) {
            set("algorithm_type", algorithm.name());
            set("solver_order", &order.to_string());
        }
        let schedule = match (schedule, suffix, known) {
            ("", suffix, _) => suffix,
            ("Automatic", _, Some(known)) => known.automatic,
            (schedule, _, _) => schedule,
        };
        let flag = match schedule {
            "Karras" => Some("use_karras_sigmas"),
            // Of the schedule with a curvature the web interface's default is 1: the same.
            "Exponential" | "Polyexponential" => Some("use_exponential_sigmas"),
            "Beta" => Some("use_beta_sigmas"),
            "" | "Automatic" | "Uniform" | "Normal" | "SGM Uniform" | "Simple" => None,
            other => {
                self.unused.push(format!("Schedule type: {other}"));
                return;
            }
        };
        let spacing = match schedule {
            "SGM Uniform" | "Simple" => "trailing",
            _ => "linspace",
        };
        // A class's name says nothing of how the web interface would space it.
        if known.is_some() && has_schedule(kind) && kind.reads("timestep_spacing") {
            set("timestep_spacing", spacing);
        }
        match flag {
            Some(flag) if kind.reads(flag) => set(flag, "True"),
            Some(_) => self.unused.push(format!(
                "Schedule type: {schedule} ({} does not read it here)",
                kind.class_name()
            )),
            None => {}
        }
    }
}

/// `Key: value, Key: "a value, as JSON", ...`, up to what is not of this form.
fn fields(line: &str) -> Vec<(&str, String)> {
    let mut fields = Vec::new();
    let mut rest = line.trim();
    while let Some((key, after)) = rest.split_once(':') {
        let after = after.trim_start();
        let mut json = serde_json::Deserializer::from_str(after).into_iter::<String>();
        let quoted = match after.starts_with('"') {
            true => json.next().and_then(Result::ok),
            false => None,
        };
        let (value, length) = match quoted {
            Some(value) => (value, json.byte_offset()),
            None => {
                let length = after.find(',').unwrap_or(after.len());
                (after[..length].trim().to_owned(), length)
            }
        };
        fields.push((key.trim(), value));
        let next = after[length..].trim_start();
        rest = next.strip_prefix(',').unwrap_or(next).trim_start();
    }
    fields
}

#[cfg(test)]
mod tests {
    use crate::schedulers::{AlgorithmType, SchedulerConfig, TimestepSpacing};

    use super::super::web_sampler::WebSampler;
    use super::*;

    fn read(text: &str) -> WebSettings {
        WebSettings::read(text, (5, 3)).unwrap()
    }

    fn sampler(name: &str, schedule: &str) -> WebSettings {
        let schedule = match schedule {
            "" => String::new(),
            given => format!("Schedule type: {given}, "),
        };
        read(&format!(
            "a cat\nSteps: 20, Sampler: {name}, {schedule}CFG scale: 7, Seed: 1, Size: 512x768"
        ))
    }

    fn options(read: &WebSettings) -> Vec<String> {
        let options = read.settings.options.iter();
        let words = options.map(|(key, value)| {
            let key = key.strip_prefix("diffusion_scheduler_config.").unwrap();
            format!("{key}={value}")
        });
        words.collect()
    }

    #[test]
    fn samplers_have_the_names_of_web_interfaces() {
        let sd = SchedulerConfig::stable_diffusion;
        let named = |config: &SchedulerConfig| {
            let WebSampler { name, schedule } = WebSampler::of(config);
            format!("{name}, {schedule}")
        };
        use SchedulerKind::*;
        for (kind, expected) in [
            (Ddim, "DDIM, Automatic"),
            (Ddpm, "DDPM, Automatic"),
            (Pndm, "PLMS, Automatic"),
            (Euler, "Euler, Uniform"),
            (EulerAncestral, "Euler a, Uniform"),
            (Heun, "Heun, Uniform"),
            (Kdpm2, "DPM2, Uniform"),
            (Kdpm2Ancestral, "DPM2 a, Uniform"),
            (Lms, "LMS, Uniform"),
            (DpmMultistep, "DPM++ 2M, Uniform"),
            (DpmSinglestep, "DPM++ 2S, Uniform"),
            (UniPc, "UniPC, Automatic"),
            (Lcm, "LCM, Automatic"),
            (Tcd, "TCD, Automatic"),
        ] {
            assert_eq!(named(&sd(kind)), expected);
        }
        let sde = SchedulerConfig {
            algorithm_type: AlgorithmType::SdeDpmSolverPlusPlus,
            use_karras_sigmas: true,
            ..sd(DpmMultistep)
        };
        assert_eq!(named(&sde), "DPM++ 2M SDE, Karras");
        let third = SchedulerConfig {
            solver_order: 3,
            use_karras_sigmas: false,
            use_exponential_sigmas: true,
            ..sde
        };
        assert_eq!(named(&third), "DPM++ 3M SDE, Exponential");
        // Karras's noise levels of a sampler that does not read them.
        let ddim = SchedulerConfig {
            use_karras_sigmas: true,
            ..sd(Ddim)
        };
        assert_eq!(named(&ddim), "DDIM, Automatic");
        let trailing = SchedulerConfig {
            timestep_spacing: TimestepSpacing::Trailing,
            ..sd(EulerAncestral)
        };
        assert_eq!(named(&trailing), "Euler a, SGM Uniform");
    }

    #[test]
    fn every_name_is_read_back() {
        for kind in SchedulerKind::ALL {
            for karras in [false, true] {
                let config = SchedulerConfig {
                    use_karras_sigmas: karras,
                    timestep_spacing: TimestepSpacing::Linspace,
                    ..SchedulerConfig::stable_diffusion(kind)
                };
                // A name that only this program writes.
                if kind == SchedulerKind::DpmSinglestep {
                    continue;
                }
                let web = WebSampler::of(&config);
                let found = sampler(&web.name, web.schedule);
                assert_eq!(found.settings.scheduler, kind.class_name());
                assert_eq!(found.unknown_sampler, None);
                assert_eq!(found.unused, [""; 0]);
                let flag = "diffusion_scheduler_config.use_karras_sigmas";
                let is_read = karras && kind.reads("use_karras_sigmas");
                assert_eq!(
                    found.settings.options.contains_key(flag),
                    is_read,
                    "{kind:?}"
                );
            }
        }
    }

    #[test]
    fn schedules_of_old_and_new_versions_are_read() {
        let karras = [
            "algorithm_type=dpmsolver++",
            "solver_order=2",
            "timestep_spacing=linspace",
            "use_karras_sigmas=True",
        ];
        for (name, schedule) in [
            ("DPM++ 2M Karras", ""),
            ("DPM++ 2M", "Karras"),
            ("dpm++ 2m", "Automatic"),
        ] {
            let found = sampler(name, schedule);
            assert_eq!(found.settings.scheduler, "DPMSolverMultistepScheduler");
            assert_eq!(options(&found), karras, "{name}, {schedule}");
        }
        assert_eq!(options(&sampler("DPM++ 2M", "")), karras[..3]);
        assert_eq!(
            options(&sampler("Euler a", "Automatic")),
            ["timestep_spacing=linspace"]
        );
        assert_eq!(
            options(&sampler("Euler", "SGM Uniform")),
            ["timestep_spacing=trailing"]
        );
        assert_eq!(options(&sampler("DDIM", "Automatic")), [""; 0]);
        assert_eq!(options(&sampler("LMS", "Beta"))[1], "use_beta_sigmas=True");
        // What older versions of this program wrote.
        let own = sampler("EulerDiscreteScheduler", "");
        assert_eq!(own.settings.scheduler, "EulerDiscreteScheduler");
        assert_eq!(options(&own), [""; 0]);

        let unread = sampler("Euler a", "Karras");
        assert!(
            unread.unused[0].starts_with("Schedule type: Karras (Euler"),
            "{unread:?}"
        );
        let other = sampler("Euler", "Align Your Steps");
        assert_eq!(other.unused, ["Schedule type: Align Your Steps"]);
        let unknown = sampler("DPM adaptive", "Karras");
        assert_eq!(unknown.unknown_sampler.as_deref(), Some("DPM adaptive"));
        assert_eq!(unknown.settings.scheduler, "");
    }

    #[test]
    fn a_hires_fix_is_read() {
        let of = |fields: &str| {
            read(&format!(
                "a\nSteps: 20, Sampler: DDIM, CFG scale: 7, Seed: 1, {fields}"
            ))
        };
        let keys = |read: &WebSettings| {
            let options = read.settings.options.iter();
            options
                .map(|(key, value)| format!("{key}={value}"))
                .collect::<Vec<_>>()
        };
        let found = of(
            "Denoising strength: 0.5, Hires upscale: 2, Hires steps: 8, Hires upscaler: Latent (bicubic)",
        );
        let expected = [
            "hires_scale=2",
            "hires_steps=16",
            "hires_strength=0.5",
            "hires_upscaler=latent_bicubic",
        ];
        assert_eq!(keys(&found), expected);
        assert_eq!(found.unused, [""; 0]);
        let found = of("Denoising strength: 0.4, Hires upscale: 1.5, Hires upscaler: R-ESRGAN 4x+");
        let expected = [
            "hires_scale=1.5",
            "hires_steps=50",
            "hires_strength=0.4",
            "hires_upscaler=lanczos",
        ];
        assert_eq!(keys(&found), expected);
        assert_eq!(
            found.unused,
            ["Hires upscaler: R-ESRGAN 4x+ (not here; lanczos enlarges the image)"]
        );
        // Image to image.
        let found = of("Denoising strength: 0.4");
        assert_eq!(keys(&found), [""; 0]);
        assert_eq!(found.unused, ["Denoising strength: 0.4"]);
    }

    #[test]
    fn texts_of_web_interfaces_are_read() {
        let found = read(
            "a cat, (sitting:1.2)\non a mat <lora:x:0.8>\nNegative prompt: blurry, \"bad\"\nworse\nSteps: 25, Sampler: UniPC, \
             Schedule type: Automatic, CFG scale: 5.5, Seed: 18446744073709551615, Size: 640x512, Model hash: 6ce0161689, \
             Model: \"dreams, v2: \\\"p\\\"\", Clip skip: 2, Lora hashes: \"x: 0123, y: 45\", Version: v1.10.1",
        );
        let settings = &found.settings;
        assert_eq!(
            settings.prompt,
            "a cat, (sitting:1.2)\non a mat <lora:x:0.8>"
        );
        assert_eq!(settings.negative_prompt, "blurry, \"bad\"\nworse");
        assert_eq!((settings.steps, settings.seed), (25, u64::MAX));
        assert_eq!(settings.guidance_scale, 5.5);
        assert_eq!((settings.width, settings.height), (640, 512));
        assert_eq!(settings.model, "dreams, v2: \"p\"");
        assert_eq!(settings.model_hash.as_deref(), Some("6ce0161689"));
        assert_eq!(found.unused.len(), 2, "{found:?}");
        assert!(found.unused[0].starts_with("Clip skip: 2 "));
        assert_eq!(found.unused[1], "Lora hashes: x: 0123, y: 45");

        let bare = read("Steps: 3, Sampler: DDIM, CFG scale: 1, Seed: 4");
        assert_eq!(bare.settings.prompt, "");
        assert_eq!((bare.settings.width, bare.settings.height), (5, 3));

        let error = |text: &str| WebSettings::read(text, (5, 3)).unwrap_err();
        assert_eq!(error("a cat"), "`Steps` is missing");
        assert_eq!(error(""), "`Steps` is missing");
        assert_eq!(
            error("a\nSteps: 3, Sampler: DDIM"),
            "`CFG scale` is missing"
        );
        assert!(error("Steps: many, Sampler: DDIM").contains("`Steps` is 'many'"));
        assert!(error("Steps: 3, Size: big").contains("512x768"));
        error("Steps: \"3, : , ::,");
    }
}

//! Names of samplers in web interfaces.

use crate::schedulers::{AlgorithmType, SchedulerConfig, SchedulerKind, TimestepSpacing};

/// A sampler as web interfaces name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebSampler {
    /// `Sampler`, such as `DPM++ 2M`.
    pub name: String,
    /// `Schedule type`, such as `Karras`.
    pub schedule: &'static str,
}

/// A name of a sampler, and what it is here.
pub(super) struct Known {
    pub name: &'static str,
    pub kind: SchedulerKind,
    /// Equation and order, of those that have them.
    pub solver: Option<(AlgorithmType, usize)>,
    /// The meaning of the web interface's schedule type `Automatic`.
    pub automatic: &'static str,
}

const fn plain(name: &'static str, kind: SchedulerKind, automatic: &'static str) -> Known {
    Known {
        name,
        kind,
        solver: None,
        automatic,
    }
}

const fn solver(
    name: &'static str,
    kind: SchedulerKind,
    solver: (AlgorithmType, usize),
    automatic: &'static str,
) -> Known {
    Known {
        name,
        kind,
        solver: Some(solver),
        automatic,
    }
}

/// The samplers of both. `DPM++ 2S`, `TCD`, `DDPM` and `Euler FlowMatch` are names of programs that follow
/// AUTOMATIC1111's.
pub(super) const KNOWN: [Known; 19] = {
    use AlgorithmType::{DpmSolverPlusPlus as Ode, SdeDpmSolverPlusPlus as Sde};
    use SchedulerKind::*;
    [
        plain("Euler a", EulerAncestral, "Uniform"),
        plain("Euler", Euler, "Uniform"),
        plain("LMS", Lms, "Uniform"),
        plain("Heun", Heun, "Uniform"),
        plain("DPM2", Kdpm2, "Karras"),
        plain("DPM2 a", Kdpm2Ancestral, "Karras"),
        solver("DPM++ 2M", DpmMultistep, (Ode, 2), "Karras"),
        solver("DPM++ 2M SDE", DpmMultistep, (Sde, 2), "Exponential"),
        solver("DPM++ 3M SDE", DpmMultistep, (Sde, 3), "Exponential"),
        solver("DPM++ SDE", DpmSinglestep, (Sde, 2), "Karras"),
        plain("DDIM", Ddim, "Automatic"),
        plain("PLMS", Pndm, "Automatic"),
        plain("UniPC", UniPc, "Automatic"),
        plain("LCM", Lcm, "Automatic"),
        plain("TCD", Tcd, "Automatic"),
        plain("DDPM", Ddpm, "Automatic"),
        plain("Euler FlowMatch", FlowMatchEuler, "Automatic"),
        plain("Heun FlowMatch", FlowMatchHeun, "Automatic"),
        plain("LCM FlowMatch", FlowMatchLcm, "Automatic"),
    ]
};

/// Whether the web interface's sampler of this kind steps between noise levels that a schedule type spaces.
pub(super) fn has_schedule(kind: SchedulerKind) -> bool {
    use SchedulerKind::*;
    !matches!(kind, Ddim | Ddpm | Pndm | UniPc | Lcm | Tcd) && !kind.is_flow()
}

/// A sampler with its settings, as people of web interfaces and k-diffusion name them together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSampler {
    pub kind: SchedulerKind,
    /// Keys of `diffusion_scheduler_config` with their values.
    pub settings: Vec<(&'static str, String)>,
}

impl NamedSampler {
    /// Reads `plms`, `euler_a`, `dpmpp_2m`, `DPM++ 2M Karras` and the like; upper case and what stands between words do
    /// not count. The schedule type is Karras, Exponential, Beta, SGM Uniform, Simple or left out.
    pub fn read(name: &str) -> Option<NamedSampler> {
        let plain = letters(name);
        let (plain, schedule) = SCHEDULES
            .iter()
            .find_map(|(schedule, setting)| {
                let rest = plain.strip_suffix(&letters(schedule))?;
                Some((rest.to_owned(), Some(*setting)))
            })
            .unwrap_or((plain, None));
        let plain = plain.strip_prefix("k").unwrap_or(&plain);
        let plain = match plain.strip_suffix("ancestral") {
            Some(rest) => format!("{rest}a"),
            None => plain.to_owned(),
        };
        let known = KNOWN.iter().find(|known| letters(known.name) == plain)?;
        let mut settings = Vec::new();
        if let Some((algorithm, order)) = known.solver {
            settings.push(("algorithm_type", algorithm.name().to_owned()));
            settings.push(("solver_order", order.to_string()));
        }
        settings.extend(schedule.map(|(key, value)| (key, value.to_owned())));
        Some(NamedSampler {
            kind: known.kind,
            settings,
        })
    }
}

/// Schedule types, and the key and value that each is here.
const SCHEDULES: [(&str, (&str, &str)); 5] = [
    ("Karras", ("use_karras_sigmas", "True")),
    ("Exponential", ("use_exponential_sigmas", "True")),
    ("Beta", ("use_beta_sigmas", "True")),
    ("SGM Uniform", ("timestep_spacing", "trailing")),
    ("Simple", ("timestep_spacing", "trailing")),
];

/// A name in lower case, with `pp` for `++`, and without what stands between words.
fn letters(name: &str) -> String {
    let name = name.to_lowercase().replace("++", "pp");
    name.chars().filter(|c| c.is_ascii_alphanumeric()).collect()
}

impl WebSampler {
    /// The name of a sampler. One that web interfaces do not have is named in the same way.
    pub fn of(config: &SchedulerConfig) -> Self {
        let own = (config.algorithm_type, config.solver_order);
        let known = KNOWN.iter().find(|known| {
            known.kind == config.kind && known.solver.is_none_or(|solver| solver == own)
        });
        let name = known.map_or_else(
            || {
                let steps = match config.kind {
                    SchedulerKind::DpmSinglestep => "S",
                    _ => "M",
                };
                let sde = match config.algorithm_type {
                    AlgorithmType::DpmSolverPlusPlus => "",
                    AlgorithmType::SdeDpmSolverPlusPlus => " SDE",
                };
                format!("DPM++ {}{steps}{sde}", config.solver_order)
            },
            |known| known.name.to_owned(),
        );
        let reads = |field| config.kind.reads(field);
        let schedule = if config.use_karras_sigmas && reads("use_karras_sigmas") {
            "Karras"
        } else if config.use_exponential_sigmas && reads("use_exponential_sigmas") {
            "Exponential"
        } else if config.use_beta_sigmas && reads("use_beta_sigmas") {
            "Beta"
        } else if !has_schedule(config.kind) {
            "Automatic"
        } else {
            // `Automatic` would mean Karras's for some.
            match config.timestep_spacing {
                TimestepSpacing::Trailing if reads("timestep_spacing") => "SGM Uniform",
                // Leading timesteps have no name there; these are the nearest.
                _ => "Uniform",
            }
        };
        WebSampler { name, schedule }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_programs_are_read_with_their_settings() {
        use SchedulerKind::*;
        let read = |name: &str| NamedSampler::read(name).map(|found| (found.kind, found.settings));
        let solver = |algorithm: &str, order: &str| {
            vec![
                ("algorithm_type", algorithm.to_owned()),
                ("solver_order", order.to_owned()),
            ]
        };
        assert_eq!(read("plms"), Some((Pndm, Vec::new())));
        for name in ["euler_a", "Euler a", "k_euler_ancestral"] {
            assert_eq!(read(name), Some((EulerAncestral, Vec::new())), "{name}");
        }
        let second = (DpmMultistep, solver("dpmsolver++", "2"));
        assert_eq!(read("dpmpp_2m"), Some(second.clone()));
        let mut karras = second;
        karras.1.push(("use_karras_sigmas", "True".to_owned()));
        for name in ["dpm++ 2m karras", "DPM++ 2M Karras", "dpmpp_2m_karras"] {
            assert_eq!(read(name), Some(karras.clone()), "{name}");
        }
        let third = (DpmMultistep, solver("sde-dpmsolver++", "3"));
        assert_eq!(read("dpmpp_3m_sde"), Some(third));
        for unknown in ["", "karras", "dpm adaptive", "dpm++ 2s a", "eulr"] {
            assert_eq!(read(unknown), None, "{unknown}");
        }
    }
}

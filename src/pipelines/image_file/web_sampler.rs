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

/// The samplers of both. `DPM++ 2S`, `TCD` and `DDPM` are names of programs that follow AUTOMATIC1111's.
pub(super) const KNOWN: [Known; 16] = {
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
    ]
};

/// Whether the web interface's sampler of this kind steps between noise levels that a schedule type spaces.
pub(super) fn has_schedule(kind: SchedulerKind) -> bool {
    use SchedulerKind::*;
    !matches!(kind, Ddim | Ddpm | Pndm | UniPc | Lcm | Tcd)
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

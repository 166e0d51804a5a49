//! Topologies, meshes and how weights and batches are split over them.

use crate::config::{Config, Hardware};
use crate::shard::Parallelism;
use crate::topology::{Accelerator, Platform};

use super::described::check_formats;
use super::{Notify, RecipeError};

/// The accelerator that `compile_topology` names, and the number of its slices; `None` for the devices here.
///
/// # Errors
/// When there is no such topology, or another key contradicts it.
pub fn compile_topology(
    config: &Config,
    notify: &mut Notify<'_>,
) -> Result<Option<(Accelerator, i64)>, RecipeError> {
    let name = &config.compile_topology;
    let slices = config.compile_topology_num_slices;
    if name.is_empty() {
        return match slices {
            -1 => Ok(None),
            given => Err(RecipeError::Usage(format!(
                "compile_topology_num_slices={given} has no effect without compile_topology"
            ))),
        };
    }
    let accelerator = Accelerator::lookup(name).map_err(RecipeError::usage)?;
    let fits = match accelerator.platform {
        Platform::Tpu => matches!(config.hardware, Hardware::Auto | Hardware::Tpu),
        Platform::Gpu => matches!(config.hardware, Hardware::Auto | Hardware::Gpu),
    };
    if !fits {
        return Err(RecipeError::Usage(format!(
            "hardware={} contradicts compile_topology={name}: leave hardware=auto, or leave compile_topology out",
            config.hardware.name()
        )));
    }
    if config.num_devices > 0 {
        return Err(RecipeError::Usage(format!(
            "num_devices={} has no effect with compile_topology={name}: the topology says how many devices there are",
            config.num_devices
        )));
    }
    let slices = if slices == -1 { 1 } else { slices };
    accelerator
        .check_slices(slices)
        .map_err(RecipeError::usage)?;
    check_formats(config, accelerator.chip, notify)?;
    Ok(Some((accelerator, slices)))
}

/// The `dcn_*` and `ici_*` keys.
pub fn parallelism(config: &Config) -> Parallelism {
    Parallelism {
        dcn: [
            config.dcn_data_parallelism,
            config.dcn_fsdp_parallelism,
            config.dcn_context_parallelism,
            config.dcn_tensor_parallelism,
        ],
        ici: [
            config.ici_data_parallelism,
            config.ici_fsdp_parallelism,
            config.ici_context_parallelism,
            config.ici_tensor_parallelism,
        ],
        allow_split_physical_axes: config.allow_split_physical_axes,
    }
}

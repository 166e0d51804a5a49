//! The compile options of a program.

use std::collections::BTreeMap;
use std::path::Path;

use prost::Message;

use crate::proto::xla;

/// Options of one compilation.
///
/// Made with [`CompileOptions::new`] and changed by its methods:
///
/// ```
/// use maxdiff::pjrt::{CompileOptions, OptimizationLevel};
/// let options = CompileOptions::new(1, 4).optimization_level(OptimizationLevel::O1);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    message: xla::CompileOptionsProto,
}

/// Which device runs which part of a program: `devices[replica][partition]` are device ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAssignment {
    devices: Vec<Vec<i64>>,
}

/// How much time the compiler may spend to make the program better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizationLevel {
    O0,
    O1,
    O2,
    O3,
}

/// A value for one of the compiler's own options.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    String(String),
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl DeviceAssignment {
    /// One replica, partitioned over these devices in this order.
    pub fn partitions(ids: Vec<i64>) -> Self {
        Self { devices: vec![ids] }
    }

    fn to_message(&self) -> xla::DeviceAssignmentProto {
        let partitions = self.devices.first().map_or(0, Vec::len);
        xla::DeviceAssignmentProto {
            replica_count: self.devices.len() as i32,
            computation_count: partitions as i32,
            computation_devices: (0..partitions)
                .map(
                    |partition| xla::device_assignment_proto::ComputationDevice {
                        replica_device_ids: self.devices.iter().map(|ids| ids[partition]).collect(),
                    },
                )
                .collect(),
        }
    }
}

impl CompileOptions {
    /// A program of `num_replicas` copies, each partitioned over `num_partitions` devices. With
    /// more than one partition, Shardy partitions it after the program's `sdy` shardings.
    pub fn new(num_replicas: u32, num_partitions: u32) -> Self {
        Self {
            message: xla::CompileOptionsProto {
                executable_build_options: Some(xla::ExecutableBuildOptionsProto {
                    device_ordinal: -1,
                    num_replicas: num_replicas.into(),
                    num_partitions: num_partitions.into(),
                    use_spmd_partitioning: num_partitions > 1,
                    use_shardy_partitioner: true,
                    ..Default::default()
                }),
                ..Default::default()
            },
        }
    }

    fn build(&mut self) -> &mut xla::ExecutableBuildOptionsProto {
        self.message
            .executable_build_options
            .get_or_insert_default()
    }

    /// Whether one program for all partitions is made; on from two partitions.
    pub fn use_spmd_partitioning(mut self, on: bool) -> Self {
        self.build().use_spmd_partitioning = on;
        self
    }

    /// Whether Shardy partitions the program, in place of GSPMD; on. Programs with `sdy` ops need
    /// it.
    pub fn use_shardy_partitioner(mut self, on: bool) -> Self {
        self.build().use_shardy_partitioner = on;
        self
    }

    /// The devices to run on, in place of the compiler's choice. Its counts of replicas and
    /// partitions become the program's.
    pub fn device_assignment(mut self, assignment: &DeviceAssignment) -> Self {
        let message = assignment.to_message();
        let build = self.build();
        build.num_replicas = message.replica_count.into();
        build.num_partitions = message.computation_count.into();
        build.use_spmd_partitioning |= message.computation_count > 1;
        build.device_assignment = Some(message);
        self
    }

    /// How hard to optimize for speed.
    pub fn optimization_level(mut self, level: OptimizationLevel) -> Self {
        self.build().optimization_level = level.to_message() as i32;
        self
    }

    /// How hard to try to fit the memory.
    pub fn memory_fitting_level(mut self, level: OptimizationLevel) -> Self {
        self.build().memory_fitting_level = level.to_message() as i32;
        self
    }

    /// Bytes the program may use on a device, in place of the target's own limit.
    pub fn device_memory_size(mut self, bytes: i64) -> Self {
        self.build().device_memory_size = bytes;
        self
    }

    /// With the folder in which XLA's compiler for GPUs finds `bin/ptxas` and `nvvm/libdevice`; other compilers do not
    /// read it.
    pub fn with_cuda_data_dir(self, dir: Option<&Path>) -> Self {
        match dir {
            Some(dir) => {
                let dir = OptionValue::String(dir.display().to_string());
                self.set("xla_gpu_cuda_data_dir", dir)
            }
            None => self,
        }
    }

    /// Sets one of the compiler's own options (`xla_...`). The compiler refuses names it does not
    /// know, with an error of the compilation.
    pub fn set(mut self, name: impl Into<String>, value: OptionValue) -> Self {
        use xla::option_override_proto::Value;
        let value = match value {
            OptionValue::String(value) => Value::StringField(value),
            OptionValue::Bool(value) => Value::BoolField(value),
            OptionValue::Int(value) => Value::IntField(value),
            OptionValue::Float(value) => Value::DoubleField(value),
        };
        self.message
            .env_option_overrides
            .insert(name.into(), xla::OptionOverrideProto { value: Some(value) });
        self
    }

    /// The compiler's own options that were set, by name, as text.
    pub fn overrides(&self) -> BTreeMap<&str, String> {
        use xla::option_override_proto::Value;
        self.message
            .env_option_overrides
            .iter()
            .map(|(name, value)| {
                let text = match &value.value {
                    Some(Value::StringField(value)) => value.clone(),
                    Some(Value::BoolField(value)) => value.to_string(),
                    Some(Value::IntField(value)) => value.to_string(),
                    Some(Value::DoubleField(value)) => value.to_string(),
                    None => String::new(),
                };
                (name.as_str(), text)
            })
            .collect()
    }

    /// A serialized `CompileOptionsProto`. Equal options are equal bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.message.encode_to_vec()
    }
}

impl OptimizationLevel {
    fn to_message(self) -> xla::EffortLevel {
        match self {
            Self::O0 => xla::EffortLevel::EffortO0,
            Self::O1 => xla::EffortLevel::EffortO1,
            Self::O2 => xla::EffortLevel::EffortO2,
            Self::O3 => xla::EffortLevel::EffortO3,
        }
    }
}

impl From<&str> for OptionValue {
    fn from(value: &str) -> Self {
        Self::String(value.to_string())
    }
}

impl From<bool> for OptionValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for OptionValue {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for OptionValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_xla_writes() {
        // Field numbers and types by hand: 3 { 1: -1, 4: 1, 5: 4, 6: true, 19: true }.
        let mut expected = vec![0x1a, 20];
        expected.extend([
            0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
        ]);
        expected.extend([0x20, 1, 0x28, 4, 0x30, 1]);
        expected.extend([0x98, 0x01, 1]);
        assert_eq!(CompileOptions::new(1, 4).to_bytes(), expected);
    }

    #[test]
    fn options_are_written_in_the_order_of_their_names() {
        let one = CompileOptions::new(1, 1)
            .set("b", 2i64.into())
            .set("a", true.into());
        let other = CompileOptions::new(1, 1)
            .set("a", true.into())
            .set("b", 2i64.into());
        assert_eq!(one.to_bytes(), other.to_bytes());
        assert_eq!(
            one.overrides().into_iter().collect::<Vec<_>>(),
            [("a", "true".to_string()), ("b", "2".to_string())]
        );
    }

    #[test]
    fn an_assignment_lists_the_replicas_of_each_partition() {
        let assignment = DeviceAssignment {
            devices: vec![vec![10, 11, 12], vec![20, 21, 22]],
        };
        let message = assignment.to_message();
        assert_eq!((message.replica_count, message.computation_count), (2, 3));
        let ids: Vec<_> = message
            .computation_devices
            .into_iter()
            .map(|d| d.replica_device_ids)
            .collect();
        assert_eq!(ids, [[10, 20], [11, 21], [12, 22]]);
    }

    #[test]
    fn an_assignment_sets_the_counts() {
        let options = CompileOptions::new(1, 1)
            .device_assignment(&DeviceAssignment::partitions(vec![100000, 200000]));
        let build = options.message.executable_build_options.unwrap();
        assert_eq!((build.num_replicas, build.num_partitions), (1, 2));
        assert!(build.use_spmd_partitioning);
    }
}

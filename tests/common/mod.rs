//! What the suites share; each uses a part of it.
#![allow(dead_code, unused_imports)]

mod golden;
mod plugins;

pub use golden::*;

use maxdiff::pjrt::{Client, NamedValue, Plugin};

/// The CPU plugin. Fails when it is not installed.
pub fn cpu_plugin() -> Plugin {
    let path = plugins::plugin_path("cpu", "pjrt_cpu_plugin.so");
    Plugin::load(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// The TPU plugin, for compiling ahead of time. Fails when it is not installed.
pub fn tpu_plugin() -> Plugin {
    maxdiff::pjrt::prepare_process().unwrap_or_else(|error| panic!("{error}"));
    let path = plugins::plugin_path("tpu", "libtpu.so");
    Plugin::load(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// A client of the CPU plugin with this many virtual devices.
pub fn cpu_client(devices: i64) -> Client {
    let options = [("cpu_device_count".to_string(), NamedValue::Int64(devices))];
    Client::create(&cpu_plugin(), &options).unwrap_or_else(|error| panic!("{error}"))
}

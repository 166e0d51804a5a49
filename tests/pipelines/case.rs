//! The recorded pipelines.

use crate::common::{Golden, golden};
use maxdiff::data::Tokenizer;
use maxdiff::emit::DotPrecision;
use maxdiff::host_tensor::HostTensor;
use maxdiff::models::clip::vision::ClipVisionConfig;
use maxdiff::models::controlnet;
use maxdiff::models::ip_adapter::{self, IpAdapterConfig};
use maxdiff::models::vae::{self, Autoencoder};
use maxdiff::models::{
    Denoiser, DenoiserKind, DiffusionModel, HiddenState, MicroConditioning, Part, TextEncoder,
    TextEncoderConfig, TextEncoderKind, TextPlace,
};
use maxdiff::nn::{Precision, Remat};
use maxdiff::pipelines::generator::{CompiledModel, ModelOutput, SamplingOptions};
use maxdiff::pipelines::prompt::{PromptSyntax, encode_prompt};
use maxdiff::pipelines::text_to_image::{DenoiseOptions, Guidance};
use maxdiff::pipelines::traced::TracedModel;
use maxdiff::pipelines::{
    EmbeddingRows, Observer, PipelineError, TakeWeight, TokenizedImage, WeightSource,
};
use maxdiff::quant::Policy;
use maxdiff::runtime::{Session, Slot};
use maxdiff::schedulers::{PlanOptions, SamplingPlan, SchedulerConfig};
use maxdiff::weights::Checkpoint;
use maxdiff::weights::source::ModelSource;

/// The recorded vocabulary as a tokenizer that pads with `pad`.
pub fn tokenizer(pad: &str) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt"] {
        std::fs::copy(golden("tokenizer").join(file), dir.path().join(file)).unwrap();
    }
    let config = serde_json::json!({
        "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": pad,
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::from_dir(dir.path(), 77).unwrap()
}

/// A recorded pipeline and its model.
pub struct Case {
    pub source: ModelSource,
    pub golden: Golden,
    pub model: DiffusionModel,
    pub tokenizers: Vec<Tokenizer>,
    pub is_xl: bool,
    /// The file of its IP-Adapter, if it has one.
    pub adapter: String,
    /// The folder of the UNet in that of the pipeline.
    pub unet: &'static str,
    pub quantization: Option<Policy>,
    /// Rows of embedding tables that textual inversions replace.
    pub rows: Vec<EmbeddingRows>,
}

impl Case {
    pub fn read(name: &str, precision: Precision) -> Case {
        let folder = format!("pipeline_{name}");
        let source = ModelSource::open(&golden(&folder)).unwrap();
        let config = |part: Part| source.component(part).unwrap().config.clone();
        let is_xl = name == "sdxl";
        let text_encoder = |part: Part, hidden: HiddenState| TextEncoder {
            part,
            config: TextEncoderConfig::from_map(TextEncoderKind::Clip, config(part)).unwrap(),
            hidden,
            place: TextPlace::Beside,
            masked: false,
            tokens: 77,
        };
        let normed = HiddenState::Normed { skip: 0 };
        let mut text_encoders = vec![text_encoder(Part::TextEncoder, normed)];
        let mut tokenizers = vec![tokenizer("<|endoftext|>")];
        if is_xl {
            text_encoders[0].hidden = HiddenState::Raw { skip: 1 };
            let raw = HiddenState::Raw { skip: 1 };
            text_encoders.push(text_encoder(Part::TextEncoder2, raw));
            tokenizers.push(tokenizer("!"));
        }
        let model = DiffusionModel {
            family: source.family,
            denoiser: Denoiser::from_map(DenoiserKind::Unet, config(Part::Unet)).unwrap(),
            text_encoders,
            controlnets: Vec::new(),
            ip_adapter: None,
            vae: Some(Autoencoder::from_map(config(Part::Vae)).unwrap()),
            preview_vae: None,
            precision,
            remat: Remat::None,
            scan_layers: None,
            scheduler: SchedulerConfig::from_map(source.scheduler.as_ref().unwrap()).unwrap(),
            sample_size: [8, 8],
            image_size: [16, 16],
            tokens: 77,
            micro_conditioning: MicroConditioning::TargetSize,
            decode_tile: None,
        };
        Case {
            adapter: String::new(),
            unet: "unet",
            golden: Golden::read(&format!("{folder}/io.safetensors")),
            source,
            model,
            tokenizers,
            is_xl,
            quantization: None,
            rows: Vec::new(),
        }
    }

    /// The same parts with a recorded IP-Adapter.
    pub fn with_adapter(name: &str, adapter: &str) -> Case {
        let mut case = Case::read(name, Precision::F32);
        case.adapter = format!("ip_adapter/{adapter}.safetensors");
        let file = Checkpoint::open(&golden(&case.adapter)).unwrap();
        let vision = Golden::text("ip_adapter/image_encoder/config.json");
        let vision = ClipVisionConfig::from_json(&vision).unwrap();
        let unet = case.model.denoiser.unet().unwrap();
        let features = unet.cross_attention_dim.get(0).unwrap();
        let sizes = |name: &str| file.info(name).map(|shape| shape.dims.clone());
        case.model.ip_adapter = Some(IpAdapterConfig::new(vision, features, &sizes).unwrap());
        case
    }

    /// The same parts with a UNet for inpainting.
    pub fn inpainting(name: &str) -> Case {
        let mut case = Case::read(name, Precision::F32);
        case.unet = "unet_inpainting";
        let config = Golden::text(&format!("pipeline_{name}/{}/config.json", case.unet));
        let config = serde_json::from_str(&config).unwrap();
        case.model.denoiser = Denoiser::from_map(DenoiserKind::Unet, config).unwrap();
        case
    }

    /// SDXL's refiner, with the second text encoder and the VAE of the base model.
    pub fn refiner() -> Case {
        let mut case = Case::read("sdxl", Precision::F32);
        let source = ModelSource::open(&golden("pipeline_refiner")).unwrap();
        assert!(source.requires_aesthetics_score && !source.zero_empty_prompts);
        let unet = source.component(Part::Unet).unwrap().config.clone();
        case.golden = Golden::read("pipeline_refiner/refined.safetensors");
        let score = |key: &str| case.golden.meta[key].as_f64().unwrap() as f32;
        let micro_conditioning = MicroConditioning::AestheticScore {
            score: score("aesthetic_score"),
            negative: score("negative_aesthetic_score"),
        };
        for key in ["prompts", "negative", "guidance_scale"] {
            let io = Golden::read("pipeline_sdxl/io.safetensors");
            case.golden.meta[key] = io.meta[key].clone();
        }
        case.model = DiffusionModel {
            family: source.family,
            denoiser: Denoiser::from_map(DenoiserKind::Unet, unet).unwrap(),
            text_encoders: case.model.text_encoders.split_off(1),
            scheduler: SchedulerConfig::from_map(source.scheduler.as_ref().unwrap()).unwrap(),
            micro_conditioning,
            ..case.model
        };
        case.model.check_conditioning().unwrap();
        case.tokenizers.remove(0);
        case.is_xl = false;
        case.unet = "../pipeline_refiner/unet";
        case
    }

    pub fn text(&self, key: &str) -> String {
        self.golden.meta[key].as_str().unwrap().to_string()
    }

    pub fn images(&self) -> Vec<TokenizedImage> {
        let negative = self.text("negative");
        let encode = |text: &str| {
            self.tokenizers
                .iter()
                .map(|t| encode_prompt(t, text, PromptSyntax::Weighted).unwrap())
                .collect::<Vec<_>>()
        };
        let prompts = self.golden.meta["prompts"].as_array().unwrap();
        prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| TokenizedImage {
                plan: 0,
                guidance_scale: self.golden.meta["guidance_scale"].as_f64().unwrap() as f32,
                prompt: encode(prompt.as_str().unwrap()),
                negative: encode(&negative),
                negative_is_empty: negative.is_empty(),
                seed: i as u64,
                init: 0,
            })
            .collect()
    }

    pub fn options(&self, batch: usize) -> DenoiseOptions {
        DenoiseOptions {
            batch,
            tokens: 77,
            guidance: Guidance::OneBatch,
            skip_layers: Vec::new(),
            quantization: self.quantization.clone(),
        }
    }

    pub fn compile(&self, session: &Session, batch: usize, from_image: bool) -> CompiledModel {
        self.compile_guided(session, batch, from_image, Guidance::OneBatch)
    }

    pub fn compile_guided(
        &self,
        session: &Session,
        batch: usize,
        from_image: bool,
        guidance: Guidance,
    ) -> CompiledModel {
        let options = DenoiseOptions {
            guidance,
            ..self.options(batch)
        };
        let traced = TracedModel::new(&self.model, options, from_image).unwrap();
        let lowered = traced.lower(session).unwrap();
        CompiledModel::compile(session, &self.model, lowered, DotPrecision::Default, 1).unwrap()
    }

    pub fn plan(&self) -> SamplingPlan {
        let steps = self.golden.meta["steps"].as_u64().unwrap() as usize;
        self.model.scheduler.plan(&PlanOptions::new(steps)).unwrap()
    }

    /// Images from the recorded noise.
    pub fn draw(&self, session: &Session, compiled: &CompiledModel) -> ModelOutput {
        let dims = self.golden.dims("in/latents");
        let values: Vec<f32> = self
            .golden
            .values("in/latents")
            .iter()
            .map(|v| *v as f32)
            .collect();
        let latents = HostTensor::from_f32(dims, &values).unwrap();
        let plans = [self.plan()];
        let options = SamplingOptions {
            zero_empty_prompts: self.is_xl,
            latents: Some(&latents),
            ..SamplingOptions::new(&plans)
        };
        self.run(session, compiled, &options)
    }

    pub fn run(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        options: &SamplingOptions<'_>,
    ) -> ModelOutput {
        self.run_images(session, compiled, &self.images(), options)
    }

    pub fn run_images(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
    ) -> ModelOutput {
        self.run_observed(session, compiled, images, options, &mut |_| Ok(()))
    }

    pub fn run_observed(
        &self,
        session: &Session,
        compiled: &CompiledModel,
        images: &[TokenizedImage],
        options: &SamplingOptions<'_>,
        observer: &mut Observer<'_>,
    ) -> ModelOutput {
        let tensor = |slot: &Slot| -> Result<HostTensor, PipelineError> {
            let (root, key) = slot.name.split_once('/').unwrap();
            let beside = match root {
                ip_adapter::ROOT => &self.adapter,
                ip_adapter::IMAGE_ENCODER => "ip_adapter/image_encoder",
                _ => "",
            };
            if !beside.is_empty() {
                let file = Checkpoint::open(&golden(beside))?;
                return Ok(file.read_as(key, slot.shape.dtype)?);
            }
            let folder = match root {
                _ if root.starts_with(controlnet::ROOT) => root,
                "unet" => self.unet,
                vae::PREVIEW_ROOT => "../vae_tiny",
                _ => "",
            };
            if !folder.is_empty() {
                let file = Checkpoint::open(&self.source.path.join(folder))?;
                return Ok(file.read_as(key, slot.shape.dtype)?);
            }
            let part = Part::from_name(root).unwrap();
            let checkpoint = &self.source.component(part)?.checkpoint;
            let mut tensor = checkpoint.read_as(key, slot.shape.dtype)?;
            for rows in &self.rows {
                rows.apply(root, key, &mut tensor)?;
            }
            Ok(tensor)
        };
        let read = |slots: &[Slot], show: &mut TakeWeight<'_>| {
            slots
                .iter()
                .try_for_each(|slot| show(session.put(&tensor(slot)?, &slot.spec)?))
        };
        compiled
            .run(
                session,
                &WeightSource::Files(&read),
                images,
                options,
                observer,
            )
            .unwrap()
    }
}

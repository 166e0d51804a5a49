//! One instruction of an optimized program.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::proto::xla::{HloInstructionProto, PrimitiveType, ShapeProto};

/// Host transfers of this handler are the TPU runtime's traffic between slices.
const MEGASCALE: &str = "xla_megascale_runtime";
const HANDLER: &str = "_xla_host_transfer_handler_name";

/// How an instruction runs the computations it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// In the caller's stead, instruction by instruction.
    Control,
    /// `while`: body first, then condition.
    While,
    /// As one kernel, whose cost stands on the caller.
    Fusion,
    /// Beside the caller, until the matching `-done`.
    Async,
    /// Per element (the sum of a reduce), or not run at all (`-done` of an async pair).
    None,
}

pub(super) fn call_of(opcode: &str) -> Call {
    match opcode {
        "call" | "conditional" => Call::Control,
        "while" => Call::While,
        "fusion" => Call::Fusion,
        "async-start" => Call::Async,
        _ => Call::None,
    }
}

/// Collectives without the suffix of their halves.
pub(super) fn is_collective(opcode: &str) -> bool {
    matches!(
        opcode,
        "all-reduce"
            | "all-gather"
            | "reduce-scatter"
            | "all-to-all"
            | "ragged-all-to-all"
            | "collective-permute"
            | "collective-broadcast"
    )
}

pub(super) fn is_megascale(instruction: &HloInstructionProto) -> bool {
    attribute(instruction, HANDLER) == Some(MEGASCALE)
}

pub(super) fn is_contraction(opcode: &str) -> bool {
    matches!(opcode, "dot" | "convolution")
}

/// Scope path the instruction was emitted with; empty when the compiler dropped it.
pub(super) fn op_name(instruction: &HloInstructionProto) -> &str {
    instruction.metadata.as_ref().map_or("", |m| &m.op_name)
}

pub(super) fn attribute<'a>(instruction: &'a HloInstructionProto, key: &str) -> Option<&'a str> {
    let attributes = instruction.frontend_attributes.as_ref()?;
    attributes.map.get(key).map(String::as_str)
}

/// Number of elements of an array shape.
pub(super) fn elements(shape: &ShapeProto) -> u64 {
    shape
        .dimensions
        .iter()
        .map(|&d| u64::try_from(d).unwrap_or(0))
        .product()
}

/// Bytes of a value without padding; tokens have none, tuples the sum of their parts.
pub(super) fn bytes(shape: &ShapeProto) -> u64 {
    if shape.element_type() == PrimitiveType::Tuple {
        return shape.tuple_shapes.iter().map(bytes).sum();
    }
    (elements(shape) * u64::from(bits(shape.element_type()))).div_ceil(8)
}

/// Bits of one element; 0 for what is no number.
pub(super) fn bits(element: PrimitiveType) -> u32 {
    use PrimitiveType as P;
    match element {
        P::Invalid | P::Tuple | P::OpaqueType | P::Token | P::Buffer => 0,
        P::S1 | P::U1 => 1,
        P::S2 | P::U2 => 2,
        P::S4 | P::U4 | P::F4e2m1fn => 4,
        P::F6e3m2fn | P::F6e2m3fn => 6,
        P::Pred | P::S8 | P::U8 => 8,
        P::F8e5m2 | P::F8e4m3fn | P::F8e4m3b11fnuz | P::F8e5m2fnuz | P::F8e4m3fnuz => 8,
        P::F8e4m3 | P::F8e3m4 | P::F8e8m0fnu => 8,
        P::S16 | P::U16 | P::F16 | P::Bf16 => 16,
        P::S32 | P::U32 | P::F32 => 32,
        P::S64 | P::U64 | P::F64 | P::C64 => 64,
        P::C128 => 128,
    }
}

/// The type's name as users of quantization write it: `int8`, `bf16`, `f8e4m3fn`.
pub(super) fn type_name(element: PrimitiveType) -> String {
    let name = element.as_str_name().to_lowercase();
    match name
        .strip_prefix('s')
        .and_then(|bits| bits.parse::<u32>().ok())
    {
        Some(bits) => format!("int{bits}"),
        None => match name
            .strip_prefix('u')
            .and_then(|bits| bits.parse::<u32>().ok())
        {
            Some(bits) => format!("uint{bits}"),
            None => name,
        },
    }
}

/// The notes of the TPU and GPU compilers on an instruction, as far as reports read them.
#[derive(Debug, Default, Deserialize)]
pub(super) struct BackendConfig {
    #[serde(default)]
    window_config: WindowConfig,
    #[serde(default)]
    known_trip_count: Option<TripCount>,
    #[serde(default)]
    custom_call_config: Option<CustomCallConfig>,
    #[serde(default)]
    scoped_memory_configs: Vec<ScopedMemory>,
    #[serde(default)]
    gemm_backend_config: Option<GemmConfig>,
}

#[derive(Debug, Deserialize)]
struct GemmConfig {
    dot_dimension_numbers: GemmDimensions,
}

#[derive(Debug, Deserialize)]
struct GemmDimensions {
    #[serde(default)]
    lhs_contracting_dimensions: Vec<Int>,
}

#[derive(Debug, Deserialize)]
struct CustomCallConfig {
    #[serde(default)]
    body: Option<String>,
    #[serde(default)]
    cost_estimate: Option<CostEstimate>,
}

#[derive(Debug, Deserialize)]
struct ScopedMemory {
    size: Int,
}

#[derive(Debug, Deserialize)]
struct CostEstimate {
    flops: Int,
    #[serde(default)]
    bytes_accessed: Option<Int>,
}

#[derive(Debug, Default, Deserialize)]
struct WindowConfig {
    #[serde(default)]
    estimated_cycles: Option<Int>,
}

#[derive(Debug, Deserialize)]
struct TripCount {
    n: Int,
}

/// Protobuf's JSON writes 64-bit integers as strings.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Int {
    Number(i64),
    Text(String),
}

impl Int {
    fn value(&self) -> Option<u64> {
        match self {
            Int::Number(n) => u64::try_from(*n).ok(),
            Int::Text(text) => text.parse().ok(),
        }
    }
}

impl BackendConfig {
    /// The part that can be parsed; targets also store texts that are not JSON.
    pub fn parse(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_default()
    }

    pub fn trip_count(&self) -> Option<u64> {
        self.known_trip_count.as_ref()?.n.value()
    }

    /// The dimensions of the first operand that a product of cuBLAS sums over.
    pub fn gemm_contraction(&self) -> Option<Vec<i64>> {
        let gemm = self.gemm_backend_config.as_ref()?;
        let dimensions = gemm.dot_dimension_numbers.lhs_contracting_dimensions.iter();
        let numbers = dimensions.map(|d| i64::try_from(d.value()?).ok());
        numbers.collect()
    }

    /// What this program says of its own TPU kernels.
    pub fn kernel_flops(&self) -> Option<u64> {
        let config = self.custom_call_config.as_ref()?;
        config.cost_estimate.as_ref()?.flops.value()
    }

    /// The bytes that this program says its own TPU kernels read and write.
    pub fn kernel_bytes(&self) -> Option<u64> {
        let config = self.custom_call_config.as_ref()?;
        let bytes = config.cost_estimate.as_ref()?.bytes_accessed.as_ref()?;
        bytes.value()
    }

    /// The Mosaic module of a TPU kernel, if it is text, as this program's are.
    pub fn kernel_text(&self) -> Option<String> {
        let body = self.custom_call_config.as_ref()?.body.as_ref()?;
        String::from_utf8(STANDARD.decode(body).ok()?).ok()
    }

    /// The bytes of on-chip memory that a TPU kernel asks for.
    pub fn kernel_memory(&self) -> Option<u64> {
        self.scoped_memory_configs.first()?.size.value()
    }

    /// libtpu writes the greatest 64-bit integer where its model gives no answer.
    pub fn estimated_cycles(&self) -> Option<u64> {
        let cycles = self.window_config.estimated_cycles.as_ref()?.value()?;
        (cycles < i64::MAX as u64).then_some(cycles)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_configs_of_any_target_are_read() {
        let parse = |text: &str| BackendConfig::parse(text.as_bytes());
        let tpu = parse(r#"{"flag_configs":[],"window_config":{"estimated_cycles":"2930"}}"#);
        assert_eq!(tpu.estimated_cycles(), Some(2930));
        let kernel = r#"{"custom_call_config":{"body":"","cost_estimate":{"flops":"512"}}}"#;
        assert_eq!(parse(kernel).kernel_flops(), Some(512));
        assert_eq!(parse(kernel).kernel_bytes(), None);
        let cost = r#"{"flops":0,"bytes_accessed":96}"#;
        let kernel = format!(r#"{{"custom_call_config":{{"body":"","cost_estimate":{cost}}}}}"#);
        assert_eq!(parse(&kernel).kernel_bytes(), Some(96));
        let number = parse(r#"{"window_config":{"estimated_cycles":17}}"#);
        assert_eq!(number.estimated_cycles(), Some(17));
        let cpu = parse(r#"{"known_trip_count":{"n":"4"},"known_init_step":{"init":"0"}}"#);
        assert_eq!((cpu.trip_count(), cpu.estimated_cycles()), (Some(4), None));
        let none = parse(r#"{"window_config":{"estimated_cycles":"9223372036854775807"}}"#);
        assert_eq!(none.estimated_cycles(), None);
        assert_eq!(parse("\u{8}not json").estimated_cycles(), None);
        assert_eq!(parse("").trip_count(), None);
    }
}

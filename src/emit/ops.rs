//! The text of each operation: one exhaustive match.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write};
use std::rc::Rc;

use crate::dtype::DType;
use crate::graph::{
    Attribute, Configuration, ConvDims, ConvLayout, CustomCall, Graph, Node, Op, Reduction,
    ScatterKind, Unary,
};
use crate::shape::Shape;
use crate::shard::CallSharding;

use super::types::dense;
use super::{DotPrecision, Emitter, Scopes};

/// The SSA name of every node's value. Results of loops and barriers are `%w#i`.
pub struct Names {
    values: Vec<String>,
    /// By node, the names within composites.
    bodies: HashMap<usize, Names>,
    /// The emitter's number of each scope of the graph.
    scopes: Vec<usize>,
}

impl Names {
    /// A sharding constraint that `constrained` does not hold has no effect: its value is its operand's.
    pub fn new(
        graph: &Graph,
        arguments: &[String],
        prefix: &str,
        scopes: &mut Scopes,
        constrained: &dyn Fn(&Node) -> bool,
    ) -> Self {
        let mut values: Vec<String> = Vec::with_capacity(graph.nodes.len());
        let mut bodies = HashMap::new();
        for (index, node) in graph.nodes.iter().enumerate() {
            let operand = |i: usize| values[node.operands[i] as usize].clone();
            values.push(match &node.op {
                Op::Parameter(i) => arguments[*i].clone(),
                Op::GetTupleElement(i) => {
                    let tuple = node.operands[0] as usize;
                    match (&graph.nodes[tuple].op, bodies.get(&tuple)) {
                        (Op::Composite { body, .. }, Some(names)) => {
                            let names: &Names = names;
                            names.results(body).nth(*i).unwrap_or_default().to_string()
                        }
                        _ => format!("{}#{i}", operand(0)),
                    }
                }
                Op::Stored => operand(0),
                Op::ShardingConstraint(_) if !constrained(node) => operand(0),
                Op::Composite { body, .. } => {
                    let arguments: Vec<String> = (0..node.operands.len()).map(operand).collect();
                    let prefix = format!("{prefix}{index}_");
                    let names = Names::new(body, &arguments, &prefix, scopes, &|_| false);
                    let result = names.results(body).next().unwrap_or_default().to_string();
                    bodies.insert(index, names);
                    result
                }
                _ => format!("{prefix}{index}"),
            });
        }
        Names {
            values,
            bodies,
            scopes: graph
                .scopes
                .iter()
                .map(|path| scopes.number(path))
                .collect(),
        }
    }

    /// The names of the outputs of their graph.
    pub fn results<'a>(&'a self, graph: &'a Graph) -> impl Iterator<Item = &'a str> {
        let outputs = graph.outputs.iter();
        outputs.map(|output| self.values[output.node as usize].as_str())
    }
}

fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let mut text = String::from("[");
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            text.push_str(", ");
        }
        let _ = write!(text, "{item}");
    }
    text.push(']');
    text
}

/// The types of an operation's operands and of its result.
struct Signature<'a> {
    operands: &'a [Rc<str>],
    result: &'a str,
}

impl fmt::Display for Signature<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, operand) in self.operands.iter().enumerate() {
            f.write_str(if i > 0 { ", " } else { "" })?;
            f.write_str(operand)?;
        }
        f.write_str(") -> ")?;
        f.write_str(self.result)
    }
}

impl Emitter<'_> {
    pub(super) fn node(&mut self, graph: &Graph, index: usize, names: &Names) {
        let node = &graph.nodes[index];
        let operand = |i: usize| names.values[node.operands[i] as usize].as_str();
        let shape_of = |i: usize| &graph.nodes[node.operands[i] as usize].shape;
        let result = self.types.of(&node.shape);
        let all: Vec<&str> = node
            .operands
            .iter()
            .map(|o| names.values[*o as usize].as_str())
            .collect();
        let operand_types: Vec<Rc<str>> = node
            .operands
            .iter()
            .map(|o| self.types.of(&graph.nodes[*o as usize].shape))
            .collect();
        let signature = Signature {
            operands: &operand_types,
            result: &result,
        };
        let op = node.op.name();
        let scope = names.scopes[node.scope as usize];
        let name = &names.values[index];
        let line = match &node.op {
            // Other names of values.
            Op::Parameter(_) | Op::GetTupleElement(_) | Op::Stored => return,
            Op::Composite { body, .. } => {
                if let Some(names) = names.bodies.get(&index) {
                    self.nodes(body, names);
                }
                return;
            }
            Op::Constant(value) => format!("stablehlo.constant dense<{}> : {result}", dense(value)),
            Op::Iota(dim) => format!("stablehlo.iota dim = {dim} : {result}"),
            // libtpu's name for it.
            Op::Uninitialized => {
                format!("stablehlo.custom_call @AllocateBuffer() : () -> {result}")
            }
            Op::Unary(Unary::Erf) => format!("chlo.erf {} : {result} -> {result}", operand(0)),
            Op::Unary(Unary::IsFinite) => {
                format!("stablehlo.is_finite {} : {signature}", operand(0))
            }
            Op::Unary(_) => format!("stablehlo.{op} {} : {result}", operand(0)),
            Op::OptimizationBarrier => {
                let location = self.location(scope, op);
                let _ = writeln!(
                    self.text,
                    "    {name}:{} = stablehlo.optimization_barrier {} : {} loc(#loc{location})",
                    all.len(),
                    all.join(", "),
                    operand_types.join(", ")
                );
                return;
            }
            Op::Binary(_) | Op::Clamp => format!("stablehlo.{op} {} : {result}", all.join(", ")),
            Op::Compare(direction) => format!(
                "stablehlo.compare {}, {}, {}, {} : {signature}",
                direction.name(),
                operand(0),
                operand(1),
                compare_type(shape_of(0).dtype)
            ),
            Op::Select => format!(
                "stablehlo.select {} : {}, {result}",
                all.join(", "),
                operand_types[0]
            ),
            Op::Convert(_) | Op::BitcastConvert(_) | Op::Reshape(_) => {
                format!("stablehlo.{op} {} : {signature}", operand(0))
            }
            Op::BroadcastInDim { dims, .. } => format!(
                "stablehlo.broadcast_in_dim {}, dims = {} : {signature}",
                operand(0),
                list(dims)
            ),
            Op::Transpose(perm) => format!(
                "stablehlo.transpose {}, dims = {} : {signature}",
                operand(0),
                list(perm)
            ),
            Op::Slice {
                start,
                limit,
                stride,
            } => {
                let ranges = (0..start.len()).map(|i| match stride[i] {
                    1 => format!("{}:{}", start[i], limit[i]),
                    s => format!("{}:{}:{s}", start[i], limit[i]),
                });
                format!(
                    "stablehlo.slice {} {} : {signature}",
                    operand(0),
                    list(ranges)
                )
            }
            Op::DynamicSlice(sizes) => format!(
                "stablehlo.dynamic_slice {}, sizes = {} : {signature}",
                all.join(", "),
                list(sizes)
            ),
            Op::DynamicUpdateSlice => {
                format!(
                    "stablehlo.dynamic_update_slice {} : {signature}",
                    all.join(", ")
                )
            }
            Op::Pad(dims) => format!(
                "stablehlo.pad {}, low = {}, high = {}, interior = {} : {signature}",
                all.join(", "),
                list(dims.iter().map(|d| d.low)),
                list(dims.iter().map(|d| d.high)),
                list(dims.iter().map(|d| d.interior))
            ),
            Op::Concatenate(dim) => format!(
                "stablehlo.concatenate {}, dim = {dim} : {signature}",
                all.join(", ")
            ),
            Op::Reverse(dims) => {
                format!(
                    "stablehlo.reverse {}, dims = {} : {result}",
                    operand(0),
                    list(dims)
                )
            }
            Op::Gather(d) => format!(
                "\"stablehlo.gather\"({}) <{{dimension_numbers = #stablehlo.gather<offset_dims = {}, collapsed_slice_dims = {}, start_index_map = {}, index_vector_dim = {}>, indices_are_sorted = false, slice_sizes = array<i64: {}>}}> : {signature}",
                all.join(", "),
                list(&d.offset_dims),
                list(&d.collapsed_slice_dims),
                list(&d.start_index_map),
                d.index_vector_dim,
                list(&d.slice_sizes).trim_matches(['[', ']'])
            ),
            Op::Scatter(kind, d) => {
                let element = self.types.of(&Shape::scalar(node.shape.dtype));
                let region = self.region_prefix();
                let combine = match kind {
                    ScatterKind::Add => format!(
                        "{region}c = stablehlo.add {region}a, {region}b : {element}\n      stablehlo.return {region}c : {element}"
                    ),
                    ScatterKind::Set => format!("stablehlo.return {region}b : {element}"),
                };
                format!(
                    "\"stablehlo.scatter\"({}) <{{indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = {}, inserted_window_dims = {}, scatter_dims_to_operand_dims = {}, index_vector_dim = {}>, unique_indices = false}}> ({{\n    ^bb0({region}a: {element}, {region}b: {element}):\n      {combine}\n    }}) : {signature}",
                    all.join(", "),
                    list(&d.update_window_dims),
                    list(&d.inserted_window_dims),
                    list(&d.scatter_dims_to_operand_dims),
                    d.index_vector_dim
                )
            }
            Op::Reduce { kind, dims } => {
                let element = self.types.of(&Shape::scalar(node.shape.dtype));
                let location = self.location(scope, op);
                let init = format!("{}init", self.region_prefix());
                let _ = writeln!(
                    self.text,
                    "    {init} = stablehlo.constant dense<{}> : {element} loc(#loc{location})",
                    identity(*kind, node.shape.dtype)
                );
                format!(
                    "stablehlo.reduce({} init: {init}) applies stablehlo.{} across dimensions = {} : ({}, {element}) -> {result}",
                    operand(0),
                    kind.name(),
                    list(dims),
                    operand_types[0]
                )
            }
            Op::DotGeneral { dims, .. } => {
                let batching = if dims.lhs_batch.is_empty() {
                    String::new()
                } else {
                    format!(
                        "batching_dims = {} x {}, ",
                        list(&dims.lhs_batch),
                        list(&dims.rhs_batch)
                    )
                };
                let precision = match self.options.precision {
                    DotPrecision::Default => String::new(),
                    p => format!(", precision = [{0}, {0}]", p.name()),
                };
                format!(
                    "stablehlo.dot_general {}, {batching}contracting_dims = {} x {}{precision} : {signature}",
                    all.join(", "),
                    list(&dims.lhs_contract),
                    list(&dims.rhs_contract)
                )
            }
            Op::Convolution { dims, .. } => {
                let (lhs, lhs_type, dims) = self.cropped(shape_of(0), scope, dims, operand(0));
                let signature = Signature {
                    operands: &[lhs_type, Rc::clone(&operand_types[1])],
                    result: &result,
                };
                let precision = match self.options.precision {
                    DotPrecision::Default => String::new(),
                    p => format!(
                        ", precision_config = [#stablehlo<precision {0}>, #stablehlo<precision {0}>]",
                        p.name()
                    ),
                };
                format!(
                    "stablehlo.convolution({lhs}, {}) {} {{batch_group_count = {} : i64, feature_group_count = {} : i64{precision}}} : {signature}",
                    operand(1),
                    conv_numbers(&dims),
                    dims.batch_groups,
                    dims.feature_groups
                )
            }
            Op::CustomCall(call) => {
                let shapes: Vec<&Shape> = (0..node.operands.len()).map(shape_of).collect();
                let call = call.as_ref();
                let others = call.others();
                let results: Vec<&Shape> = match call.in_place() {
                    0 if others.is_empty() => Vec::new(),
                    0 => [&node.shape].into_iter().chain(&others).collect(),
                    count => shapes[..count].to_vec(),
                };
                if !results.is_empty() {
                    let types = results.iter().map(|shape| self.types.of(shape));
                    let types: Vec<Rc<str>> = types.collect();
                    let signature =
                        format!("({}) -> ({})", operand_types.join(", "), types.join(", "));
                    let layouts: Vec<Vec<usize>> = results.iter().map(|s| row_major(s)).collect();
                    let line = custom_call(call, &all, &shapes, &layouts, &signature);
                    let results = results.len();
                    let location = self.location(scope, op);
                    let _ = writeln!(
                        self.text,
                        "    {name}:{results} = {line} loc(#loc{location})"
                    );
                    return;
                }
                match self.options.call(call, &shapes) {
                    None => {
                        let statements = self.call(name, call, &all, &shapes, &node.shape, scope);
                        self.text.push_str(&statements);
                        return;
                    }
                    Some(sharding) => self.shared_call(call, &all, &shapes, node, &sharding, scope),
                }
            }
            Op::While { cond, body } => {
                self.while_loop(graph, node, names, name, [cond, body]);
                return;
            }
            Op::ShardingConstraint(_) => match self.options.constraint(node) {
                Some(spec) => {
                    // The operation takes the attribute's body alone.
                    let body = spec.trim_start_matches("#sdy.sharding");
                    format!("sdy.sharding_constraint {} {body} : {result}", operand(0))
                }
                None => return,
            },
        };
        let location = self.location(scope, op);
        let _ = writeln!(self.text, "    {name} = {line} loc(#loc{location})");
    }

    /// The statements that give `name` to the result of a kernel's call.
    fn call(
        &mut self,
        name: &str,
        call: &dyn CustomCall,
        operands: &[&str],
        shapes: &[&Shape],
        result: &Shape,
        scope: usize,
    ) -> String {
        let types: Vec<Rc<str>> = shapes.iter().map(|shape| self.types.of(shape)).collect();
        let result_type = self.types.of(result);
        let location = self.location(scope, call.name());
        let Some(order) = call.returned_order() else {
            let signature = Signature {
                operands: &types,
                result: &result_type,
            };
            let results = [row_major(result)];
            let line = custom_call(call, operands, shapes, &results, &signature);
            return format!("    {name} = {line} loc(#loc{location})\n");
        };
        let back: Vec<usize> = (0..order.len())
            .filter_map(|d| order.iter().position(|place| *place == d))
            .collect();
        let dims: Vec<usize> = order.iter().map(|d| result.dims[*d]).collect();
        let returned = Shape::new(result.dtype, dims);
        let scratch = Shape::new(DType::U8, [0]);
        let returned_type = self.types.of(&returned);
        let pair = format!("({returned_type}, {})", self.types.of(&scratch));
        let results = [back.iter().rev().copied().collect(), row_major(&scratch)];
        let signature = Signature {
            operands: &types,
            result: &pair,
        };
        let line = custom_call(call, operands, shapes, &results, &signature);
        let both = format!("%call{}", name.trim_start_matches('%'));
        format!(
            "    {both}:2 = {line} loc(#loc{location})\n    {name} = stablehlo.transpose {both}#0, dims = {} : \
             ({returned_type}) -> {result_type} loc(#loc{location})\n",
            list(back),
        )
    }

    /// The call of a kernel on the parts of a batch that devices have.
    fn shared_call(
        &mut self,
        call: &dyn CustomCall,
        operands: &[&str],
        shapes: &[&Shape],
        node: &Node,
        sharding: &CallSharding<'_>,
        scope: usize,
    ) -> String {
        let own = |shape: &Shape, batch| {
            (
                sharding.part(shape, batch),
                sharding.spec(shape.rank(), batch),
            )
        };
        let pairs = shapes.iter().zip(&sharding.batch.operands);
        let (parts, specs): (Vec<Shape>, Vec<String>) =
            pairs.map(|(shape, batch)| own(shape, *batch)).unzip();
        let (result, out) = own(&node.shape, Some(sharding.batch.result));
        let types: Vec<Rc<str>> = parts.iter().map(|part| self.types.of(part)).collect();
        let result_type = self.types.of(&result);
        let prefix = self.region_prefix();
        let names: Vec<String> = (0..parts.len()).map(|i| format!("{prefix}{i}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let arguments = names.iter().zip(&types);
        let arguments: Vec<String> = arguments
            .map(|(name, of)| format!("{name}: {of}"))
            .collect();
        let parts: Vec<&Shape> = parts.iter().collect();
        let inner = self.call(
            &format!("{prefix}call"),
            call,
            &names,
            &parts,
            &result,
            scope,
        );
        let location = self.location(scope, call.name());
        let wholes: Vec<Rc<str>> = shapes.iter().map(|shape| self.types.of(shape)).collect();
        let outer = Signature {
            operands: &wholes,
            result: &self.types.of(&node.shape),
        };
        format!(
            "sdy.manual_computation({}) in_shardings={} out_shardings=[{out}] manual_axes={{{}}} ({}) {{\n\
             {inner}      sdy.return {prefix}call : {result_type} loc(#loc{location})\n    \
             }} : {outer}",
            operands.join(", "),
            list(specs),
            sharding.axes,
            arguments.join(", "),
        )
    }

    /// A convolution's lhs of this shape, its type, and the convolution's attributes, after negative padding was made a
    /// crop.
    ///
    /// For an f32 convolution with padding [-1, 1] x [0, -2] the CPU plugin of TensorFlow 2.21 returns values near
    /// 1e30; a `pad` operation with the same negative amounts is right everywhere. Padding comes after dilation, so
    /// the operation dilates too.
    fn cropped<'d>(
        &mut self,
        shape: &Shape,
        scope: usize,
        dims: &'d ConvDims,
        lhs: &str,
    ) -> (String, Rc<str>, Cow<'d, ConvDims>) {
        let lhs_type = self.types.of(shape);
        if dims
            .padding
            .iter()
            .all(|(low, high)| *low >= 0 && *high >= 0)
        {
            return (lhs.to_string(), lhs_type, Cow::Borrowed(dims));
        }
        let mut rest = dims.clone();
        let mut sizes = shape.dims.clone();
        let (mut low, mut high, mut interior) = (
            vec![0; sizes.len()],
            vec![0; sizes.len()],
            vec![0; sizes.len()],
        );
        for (s, &d) in dims.lhs.spatial.iter().enumerate() {
            let (before, after) = dims.padding[s];
            if before >= 0 && after >= 0 {
                continue;
            }
            (low[d], high[d]) = (before.min(0), after.min(0));
            interior[d] = dims.lhs_dilation[s] - 1;
            let dilated = sizes[d] + sizes[d].saturating_sub(1) * interior[d];
            // Shape inference has checked that padding leaves a size of at least 0 in all; a crop beyond the array
            // that the other side's padding makes good again stays with the convolution.
            let Some(size) = dilated.checked_add_signed((low[d] + high[d]) as isize) else {
                (low[d], high[d], interior[d]) = (0, 0, 0);
                continue;
            };
            sizes[d] = size;
            rest.padding[s] = (before.max(0), after.max(0));
            rest.lhs_dilation[s] = 1;
        }
        let location = self.location(scope, "convolution");
        let element = self.types.of(&Shape::scalar(shape.dtype));
        let cropped_type = self.types.of(&shape.with_dims(sizes));
        let prefix = self.region_prefix();
        let zero = identity(Reduction::Sum, shape.dtype);
        let _ = writeln!(
            self.text,
            "    {prefix}zero = stablehlo.constant dense<{zero}> : {element} loc(#loc{location})\n    {prefix}crop = stablehlo.pad {lhs}, {prefix}zero, low = {}, high = {}, interior = {} : ({lhs_type}, {element}) -> {cropped_type} loc(#loc{location})",
            list(low),
            list(high),
            list(interior),
        );
        (format!("{prefix}crop"), cropped_type, Cow::Owned(rest))
    }

    fn region_prefix(&mut self) -> String {
        self.regions += 1;
        format!("%r{}_", self.regions)
    }

    fn while_loop(
        &mut self,
        graph: &Graph,
        node: &Node,
        names: &Names,
        name: &str,
        [cond, body]: [&Graph; 2],
    ) {
        let carry = self.region_prefix();
        let arguments: Vec<String> = (0..node.operands.len())
            .map(|i| format!("{carry}{i}_arg"))
            .collect();
        let bindings: Vec<String> = arguments
            .iter()
            .zip(&node.operands)
            .map(|(a, o)| format!("{a} = {}", names.values[*o as usize]))
            .collect();
        let types: Vec<Rc<str>> = node
            .operands
            .iter()
            .map(|o| self.types.of(&graph.nodes[*o as usize].shape))
            .collect();
        let _ = writeln!(
            self.text,
            "    {name}:{} = stablehlo.while({}) : {}",
            types.len(),
            bindings.join(", "),
            types.join(", ")
        );
        self.text.push_str("    cond {\n");
        let prefix = self.region_prefix();
        self.body(cond, &arguments, &prefix, false);
        self.text.push_str("    } do {\n");
        let prefix = self.region_prefix();
        self.body(body, &arguments, &prefix, false);
        let location = self.location(names.scopes[node.scope as usize], "while");
        let _ = writeln!(self.text, "    }} loc(#loc{location})");
    }
}

/// The dimensions of a tensor in row-major order, the innermost first.
fn row_major(shape: &Shape) -> Vec<usize> {
    (0..shape.rank()).rev().collect()
}

/// A layout, by its dimensions from the innermost.
fn layout(minor_to_major: &[usize]) -> String {
    match minor_to_major.len() {
        0 => "dense<> : tensor<0xindex>".to_string(),
        rank => format!("dense<{}> : tensor<{rank}xindex>", list(minor_to_major)),
    }
}

/// The call of a kernel, whose operands lie in row-major order, and whose results as `results` says.
fn custom_call(
    call: &dyn CustomCall,
    operands: &[&str],
    shapes: &[&Shape],
    results: &[Vec<usize>],
    signature: &dyn fmt::Display,
) -> String {
    let config = match call.configuration(shapes) {
        Configuration::Attributes(attributes) => {
            let attributes = attributes.into_iter().map(|(name, value)| match value {
                Attribute::I32(value) => format!("{name} = {value} : i32"),
                Attribute::I64(value) => format!("{name} = {value} : i64"),
                Attribute::F32(value) => {
                    format!("{name} = {:#010x} : f32", value.to_bits())
                }
                Attribute::Text(text) => format!("{name} = \"{}\"", escaped(&text)),
            });
            let attributes: Vec<String> = attributes.collect();
            format!(
                "api_version = 4 : i32, backend_config = {{{}}}",
                attributes.join(", ")
            )
        }
        Configuration::Text(text) => {
            format!("backend_config = \"{}\"", escaped(&text))
        }
    };
    let in_place = (0..call.in_place()).map(|i| {
        // One result is no tuple.
        let place = match call.in_place() {
            1 => String::new(),
            _ => i.to_string(),
        };
        format!(
            "#stablehlo.output_operand_alias<output_tuple_indices = [{place}], operand_index = {i}, operand_tuple_indices = []>"
        )
    });
    let replaced = call.replaces(shapes.len()).map(|i| {
        format!("#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = {i}, operand_tuple_indices = []>")
    });
    let aliases: Vec<String> = in_place.chain(replaced).collect();
    let aliases = match aliases.is_empty() {
        true => String::new(),
        false => format!(", output_operand_aliases = {}", list(aliases)),
    };
    format!(
        "stablehlo.custom_call @{}({}) {{{config}, operand_layouts = {}, result_layouts = {}{aliases}}} : {signature}",
        call.target(),
        operands.join(", "),
        list(shapes.iter().map(|s| layout(&row_major(s)))),
        list(results.iter().map(|r| layout(r))),
    )
}

/// The text within a string of MLIR.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\5C").replace('"', "\\22");
    text.replace('\n', "\\0A")
}

fn compare_type(dtype: DType) -> &'static str {
    if dtype.is_float() {
        "FLOAT"
    } else if dtype.is_signed_int() {
        "SIGNED"
    } else {
        "UNSIGNED"
    }
}

/// The identity element of a reduction as a literal.
fn identity(kind: Reduction, dtype: DType) -> String {
    match kind {
        Reduction::Sum if dtype.is_float() => "0.0".to_string(),
        Reduction::Sum => "0".to_string(),
        Reduction::And => "true".to_string(),
        Reduction::Or => "false".to_string(),
        Reduction::Max | Reduction::Min => extreme(dtype, kind == Reduction::Max),
    }
}

/// The lowest value of a type, or the highest.
fn extreme(dtype: DType, lowest: bool) -> String {
    let bits = dtype.bits() as u32;
    match dtype {
        DType::F16 => if lowest { "0xFC00" } else { "0x7C00" }.to_string(),
        DType::BF16 => if lowest { "0xFF80" } else { "0x7F80" }.to_string(),
        DType::F32 => if lowest { "0xFF800000" } else { "0x7F800000" }.to_string(),
        DType::F64 => if lowest {
            "0xFFF0000000000000"
        } else {
            "0x7FF0000000000000"
        }
        .to_string(),
        // These have no infinity: the largest finite value, by its bits.
        DType::F8E4M3Fn => if lowest { "0xFE" } else { "0x7E" }.to_string(),
        DType::F8E5M2 => if lowest { "0xFC" } else { "0x7C" }.to_string(),
        DType::F4E2M1Fn => if lowest { "0xF" } else { "0x7" }.to_string(),
        DType::F8E8M0Fnu => if lowest { "0x00" } else { "0xFE" }.to_string(),
        DType::S4 | DType::S8 | DType::S16 | DType::S32 | DType::S64 => {
            let highest = i128::pow(2, bits - 1) - 1;
            if lowest { -highest - 1 } else { highest }.to_string()
        }
        DType::Pred | DType::U4 | DType::U8 | DType::U16 | DType::U32 | DType::U64 => {
            if lowest { 0 } else { u128::pow(2, bits) - 1 }.to_string()
        }
    }
}

fn conv_numbers(dims: &ConvDims) -> String {
    let layout = |l: &ConvLayout, batch: &str, feature: &str| {
        let mut names = vec![String::new(); l.rank()];
        names[l.batch] = batch.to_string();
        names[l.feature] = feature.to_string();
        for (i, &d) in l.spatial.iter().enumerate() {
            names[d] = i.to_string();
        }
        list(names)
    };
    format!(
        "dim_numbers = {}x{}->{}, window = {{stride = {}, pad = {}, lhs_dilate = {}, rhs_dilate = {}}}",
        layout(&dims.lhs, "b", "f"),
        layout(&dims.rhs, "o", "i"),
        layout(&dims.out, "b", "f"),
        list(&dims.strides),
        list(
            dims.padding
                .iter()
                .map(|(low, high)| format!("[{low}, {high}]"))
        ),
        list(&dims.lhs_dilation),
        list(&dims.rhs_dilation)
    )
}

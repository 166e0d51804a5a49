//! StableHLO text with Shardy shardings.
//!
//! Emission consumes a finished graph and cannot fail on it. Every operation carries its scope path as a location
//! (`unet/down_blocks.0.../to_q/dot_general`), which XLA keeps as `op_name` in the optimized program.

mod modules;
mod ops;
mod types;

pub use modules::{LoadGroup, Module, Modules};

use std::collections::HashMap;
use std::fmt::Write;
use std::rc::Rc;

use crate::graph::{CustomCall, Graph, Node, Op};
use crate::shape::Shape;
use crate::shard::{CallSharding, ShardingText};
use crate::util::named;

use ops::Names;
use types::TypeText;

named! {
    /// How much arithmetic precision a float contraction asks of the compiler: `jax.lax.Precision`.
    ///
    /// On TPU `Default` multiplies f32 in one bf16 pass, `High` in three, `Highest` in six. CPUs ignore it.
    #[derive(Default)]
    pub enum DotPrecision {
        Default = "DEFAULT" (default),
        High = "HIGH",
        Highest = "HIGHEST",
    }
}

/// The options of emission.
#[derive(Clone, Debug, Default)]
pub struct EmitOptions {
    pub precision: DotPrecision,
    /// `None` emits a program for one device; sharding constraints then vanish.
    pub sharding: Option<ShardingText>,
}

impl EmitOptions {
    /// How devices share the call of a kernel on operands of these shapes.
    fn call(&self, call: &dyn CustomCall, operands: &[&Shape]) -> Option<CallSharding<'_>> {
        let calls = self.sharding.as_ref()?.calls.as_ref()?;
        calls.of(call, operands)
    }

    /// The sharding of the constraint `node`.
    fn constraint(&self, node: &Node) -> Option<&str> {
        let Op::ShardingConstraint(axes) = &node.op else {
            return None;
        };
        let constraints = &self.sharding.as_ref()?.constraints;
        let text = constraints.get(&(axes.clone(), node.shape.dims.clone()))?;
        Some(text)
    }
}

/// The program as StableHLO text, ready for PJRT.
///
/// Operations that no output depends on are left out. Inputs all stay: they are the program's signature.
pub fn stablehlo(graph: &Graph, name: &str, options: &EmitOptions) -> String {
    let mut emitter = Emitter {
        text: String::with_capacity(graph.nodes.len() * 160 + 4096),
        types: TypeText::default(),
        scopes: Scopes::default(),
        location_lines: String::new(),
        options,
        regions: 0,
    };
    emitter.module(graph, name);
    emitter.finish()
}

struct Emitter<'a> {
    text: String,
    types: TypeText,
    scopes: Scopes,
    location_lines: String,
    options: &'a EmitOptions,
    regions: usize,
}

impl Emitter<'_> {
    fn finish(self) -> String {
        let mut text = self.location_lines;
        text.push_str(&self.text);
        text
    }

    fn module(&mut self, graph: &Graph, name: &str) {
        let partitions = self
            .options
            .sharding
            .as_ref()
            .map_or(1, |s| s.num_partitions);
        let _ = writeln!(
            self.text,
            "module @{} attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = 1 : i32}} {{",
            symbol(name)
        );
        if let Some(sharding) = &self.options.sharding {
            let _ = writeln!(self.text, "  {}", sharding.mesh);
        }
        self.text.push_str("  func.func public @main(");
        for (index, input) in graph.inputs.iter().enumerate() {
            if index > 0 {
                self.text.push_str(", ");
            }
            let _ = write!(self.text, "%arg{index}: {}", self.types.of(&input.shape));
            let mut attributes = Vec::new();
            if let Some(result) = graph.outputs.iter().position(|o| o.alias == Some(index)) {
                attributes.push(format!("tf.aliasing_output = {result} : i32"));
            }
            if let Some(spec) = self.sharding_of(|s| &s.inputs, index) {
                attributes.push(spec);
            }
            self.attributes(&attributes);
            let _ = write!(self.text, " loc({})", quoted(&input.name));
        }
        self.text.push_str(") -> (");
        for (index, output) in graph.outputs.iter().enumerate() {
            if index > 0 {
                self.text.push_str(", ");
            }
            let shape = &graph.nodes[output.node as usize].shape;
            self.text.push_str(&self.types.of(shape));
            let mut attributes = vec![format!("jax.result_info = {}", quoted(&output.name))];
            if let Some(spec) = self.sharding_of(|s| &s.outputs, index) {
                attributes.push(spec);
            }
            self.attributes(&attributes);
        }
        self.text.push_str(") {\n");
        let arguments: Vec<String> = (0..graph.inputs.len())
            .map(|i| format!("%arg{i}"))
            .collect();
        self.body(graph, &arguments, "%", true);
        self.text.push_str("  }\n}\n");
    }

    fn sharding_of(
        &self,
        list: impl Fn(&ShardingText) -> &Vec<String>,
        index: usize,
    ) -> Option<String> {
        let sharding = self.options.sharding.as_ref()?;
        let spec = list(sharding).get(index)?;
        Some(format!("sdy.sharding = {spec}"))
    }

    fn attributes(&mut self, attributes: &[String]) {
        if !attributes.is_empty() {
            let _ = write!(self.text, " {{{}}}", attributes.join(", "));
        }
    }

    /// Emits the live nodes of `graph` and its return. `prefix` starts the names of its values.
    fn body(&mut self, graph: &Graph, arguments: &[String], prefix: &str, main: bool) {
        let options = self.options;
        let names = Names::new(graph, arguments, prefix, &mut self.scopes, &|node| {
            options.constraint(node).is_some()
        });
        self.nodes(graph, &names);
        let results: Vec<&str> = names.results(graph).collect();
        let types: Vec<Rc<str>> = graph
            .outputs
            .iter()
            .map(|o| self.types.of(&graph.nodes[o.node as usize].shape))
            .collect();
        let keyword = if main { "return" } else { "stablehlo.return" };
        let _ = writeln!(
            self.text,
            "    {keyword} {} : {}",
            results.join(", "),
            types.join(", ")
        );
    }

    /// Emits the live nodes of `graph`, whose values are called `names`.
    fn nodes(&mut self, graph: &Graph, names: &Names) {
        let live = graph.live_nodes();
        for index in (0..graph.nodes.len()).filter(|index| live[*index]) {
            self.node(graph, index, names);
        }
    }

    /// The alias of a location, defined on first use. `scope` is a number of [`Scopes`].
    fn location(&mut self, scope: usize, op: &'static str) -> usize {
        let (path, aliases) = &mut self.scopes.entries[scope];
        if let Some((_, alias)) = aliases.iter().find(|(known, _)| *known == op) {
            return *alias;
        }
        let alias = self.scopes.aliases;
        self.scopes.aliases += 1;
        aliases.push((op, alias));
        let separator = if path.is_empty() || path.ends_with('/') {
            ""
        } else {
            "/"
        };
        let _ = writeln!(
            self.location_lines,
            "#loc{alias} = loc({})",
            quoted(&format!("{path}{separator}{op}"))
        );
        alias
    }
}

/// Scopes of the graph and of the regions in it, and the aliases of the locations in them.
#[derive(Default)]
struct Scopes {
    numbers: HashMap<String, usize>,
    /// By number, a path and the alias of each operation's name.
    entries: Vec<(String, Vec<(&'static str, usize)>)>,
    aliases: usize,
}

impl Scopes {
    fn number(&mut self, path: &str) -> usize {
        if let Some(number) = self.numbers.get(path) {
            return *number;
        }
        let number = self.entries.len();
        self.numbers.insert(path.to_string(), number);
        self.entries.push((path.to_string(), Vec::new()));
        number
    }
}

/// An MLIR string literal.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\{:02X}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A symbol name: letters, digits and underscores.
fn symbol(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests;

//! The update of weights on the CPU device: AdamW against optax over five steps, and the other optimizers.

mod others;

use std::collections::BTreeMap;

use crate::common::{Golden, cpu_session, put_state};
use maxdiff::dtype::DType;
use maxdiff::graph::random::RandomKey;
use maxdiff::graph::{Builder, Graph, Init};
use maxdiff::host_tensor::HostTensor;
use maxdiff::runtime::{Program, ProgramOptions, Session, Value};
use maxdiff::shape::Shape;
use maxdiff::train::optimizer::{
    self, AdamOptions, EMA, FIRST_MOMENT, INITIAL, Optimizer, OptimizerOptions, SECOND_MOMENT,
    Trained, UPDATES, UpdateInputs,
};

const STEPS: usize = 5;
const WEIGHTS: [&str; 2] = ["weight", "bias"];

/// The update of weights `m/<name>` with gradients, loss and learning rate as inputs.
fn update(weights: &[(String, Shape)], options: &OptimizerOptions) -> Graph {
    let b = Builder::new();
    let trained: Vec<Trained> = weights
        .iter()
        .map(|(key, shape)| {
            let weight = b
                .root("m")
                .param(key, shape.clone(), Init::Zeros, &[])
                .unwrap();
            let gradient = shape.with_dtype(DType::F32);
            Trained {
                name: format!("m/{key}"),
                is_vector: shape.rank() <= 1,
                weight,
                gradient: b.input(&format!("grad_{key}"), gradient, &[]).unwrap(),
                learning_rate: None,
                logical_axes: Vec::new(),
            }
        })
        .collect();
    let scalar = |name| b.input(name, Shape::scalar(DType::F32), &[]).unwrap();
    let word = |name| b.input(name, Shape::scalar(DType::U32), &[]).unwrap();
    let inputs = UpdateInputs {
        loss: scalar("loss"),
        learning_rate: scalar("learning_rate"),
        is_last: None,
        rounding: options.rounds().then(|| RandomKey {
            high: word("key"),
            low: word("key_low"),
        }),
    };
    let update = optimizer::update(&b, &trained, inputs, options).unwrap();
    b.output("grad_norm", update.grad_norm, None).unwrap();
    let finite = b.convert(update.finite, DType::F32).unwrap();
    b.output("finite", finite, None).unwrap();
    b.finish()
}

/// A compiled update and the state it carries from step to step.
struct Run<'a> {
    session: &'a Session,
    program: Program,
    state: BTreeMap<String, HostTensor>,
}

impl<'a> Run<'a> {
    fn new(session: &'a Session, golden: &Golden, options: &OptimizerOptions) -> Self {
        let shapes = WEIGHTS.map(|key| {
            let shape = Shape::new(DType::F32, golden.dims(&format!("in/{key}")));
            (key.to_owned(), shape)
        });
        Run::of(session, &shapes, options, &|key, shape| {
            golden.tensor(&format!("in/{key}"), shape)
        })
    }

    /// The update of `weights`, whose values `value` gives.
    fn of(
        session: &'a Session,
        weights: &[(String, Shape)],
        options: &OptimizerOptions,
        value: &dyn Fn(&str, &Shape) -> HostTensor,
    ) -> Self {
        let graph = update(weights, options);
        // With the kernel of moments in 8 bits, where it runs.
        let graph = session.backend().claim_training(&graph, 1, &[]).unwrap();
        let program =
            Program::compile(session, &graph, "update", &ProgramOptions::default()).unwrap();
        let mut state = BTreeMap::new();
        for slot in program.inputs() {
            // The moving average and the initial value start at the weights, everything else at zero.
            let name = slot.name.trim_start_matches(EMA);
            let name = name.trim_start_matches(INITIAL);
            let value = match name.strip_prefix("m/") {
                Some(key) => value(key, &slot.shape),
                None => HostTensor::zeros(slot.shape.clone()),
            };
            state.insert(slot.name.clone(), value);
        }
        Run {
            session,
            program,
            state,
        }
    }

    /// One step; the results by name.
    fn step(
        &mut self,
        golden: &Golden,
        index: usize,
        learning_rate: f32,
        loss: f32,
    ) -> BTreeMap<String, HostTensor> {
        self.step_on(learning_rate, loss, &|key, shape| {
            recorded(golden, &format!("in/grad_{key}"), index, shape)
        })
    }

    /// One step on the gradients that `gradient` gives.
    fn step_on(
        &mut self,
        learning_rate: f32,
        loss: f32,
        gradient: &dyn Fn(&str, &Shape) -> HostTensor,
    ) -> BTreeMap<String, HostTensor> {
        for (name, value) in &mut self.state {
            if let Some(key) = name.strip_prefix("grad_") {
                *value = gradient(key, &value.shape);
            }
        }
        let scalar = |value| HostTensor::scalar_f32(DType::F32, value).unwrap();
        self.state.insert("loss".to_string(), scalar(loss));
        self.state
            .insert("learning_rate".to_string(), scalar(learning_rate));
        self.run()
    }

    fn run(&mut self) -> BTreeMap<String, HostTensor> {
        let arrays = put_state(self.session, &self.program, &self.state);
        let results = self
            .program
            .run(arrays.into_iter().map(Value::Donate).collect())
            .unwrap();
        let mut found = BTreeMap::new();
        for (slot, array) in self.program.outputs().iter().zip(&results) {
            let value = array.to_host(self.session.mesh()).unwrap();
            if self.state.contains_key(&slot.name) {
                self.state.insert(slot.name.clone(), value.clone());
            }
            found.insert(slot.name.clone(), value);
        }
        found
    }

    /// What an update changes: weights, moments, the moving average and the counter.
    fn carried(&self) -> Vec<(String, HostTensor)> {
        let outputs = self.program.outputs().iter();
        outputs
            .filter_map(|slot| Some((slot.name.clone(), self.state.get(&slot.name)?.clone())))
            .collect()
    }
}

/// Entry `index` of what was recorded of every step.
fn recorded(golden: &Golden, name: &str, index: usize, shape: &Shape) -> HostTensor {
    let count = shape.count();
    let values = &golden.values(name)[index * count..(index + 1) * count];
    HostTensor::from_f64(shape.clone(), values).unwrap()
}

fn options(golden: &Golden, case: &str) -> OptimizerOptions {
    let case = &golden.meta["cases"][case];
    let number = |key: &str| case[key].as_f64();
    OptimizerOptions {
        optimizer: Optimizer::AdamW {
            adam: AdamOptions {
                b1: number("b1").unwrap(),
                b2: number("b2").unwrap(),
                eps: number("eps").unwrap(),
            },
            moments: DType::F32,
        },
        weight_decay: number("weight_decay").unwrap(),
        decays_vectors: true,
        accumulated: 1,
        stochastic_rounding: false,
        max_grad_value: None,
        max_grad_norm: number("max_norm"),
        ema_decay: number("ema"),
    }
}

/// Asserts `|found - expected| <= absolute + relative |expected|` for every element.
fn assert_near(what: &str, found: &HostTensor, expected: &[f64], absolute: f64, relative: f64) {
    let found = found.to_f64_vec().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(
            (f - e).abs() <= absolute + relative * e.abs(),
            "{what}[{i}]: {f} is not {e}"
        );
    }
}

#[test]
fn five_steps_follow_optax() {
    let golden = Golden::read("adamw.safetensors");
    let session = cpu_session(1);
    for case in ["plain", "clipped", "schedule", "no_decay"] {
        let options = options(&golden, case);
        let rates: Vec<f32> = golden.meta["cases"][case]["lr"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_f64().unwrap() as f32)
            .collect();
        let mut run = Run::new(&session, &golden, &options);
        let mut average: BTreeMap<&str, Vec<f64>> = WEIGHTS
            .iter()
            .map(|key| (*key, golden.values(&format!("in/{key}")).to_vec()))
            .collect();
        for (step, rate) in rates.iter().enumerate() {
            let found = run.step(&golden, step, *rate, 0.5);
            let recorded = |name: &str| -> &[f64] {
                let all = golden.values(&format!("out/{case}/{name}"));
                let count = all.len() / STEPS;
                &all[step * count..(step + 1) * count]
            };
            assert_eq!(found["finite"].to_f64_vec().unwrap(), [1.0]);
            assert_eq!(found[UPDATES].to_f64_vec().unwrap(), [step as f64 + 1.0]);
            // Sums of squares of 16 elements in another order.
            let what = format!("{case} step {step} grad_norm");
            assert_near(&what, &found["grad_norm"], recorded("grad_norm"), 0.0, 4e-7);
            for key in WEIGHTS {
                let what = |of: &str| format!("{case} step {step} {of}{key}");
                let m = &found[&format!("{FIRST_MOMENT}m/{key}")];
                let v = &found[&format!("{SECOND_MOMENT}m/{key}")];
                let weight = &found[&format!("m/{key}")];
                // A few roundings of terms that may cancel; moments are at most 1 in size here.
                assert_near(
                    &what("m of "),
                    m,
                    recorded(&format!("mu_{key}")),
                    1e-7,
                    1e-6,
                );
                assert_near(&what("v of "), v, recorded(&format!("nu_{key}")), 0.0, 2e-6);
                // 1 - b2^t loses 10 bits at t = 1; half of that error times a rate of 0.01 reaches a weight.
                assert_near(&what(""), weight, recorded(key), 1e-6, 1e-6);
                let Some(decay) = options.ema_decay else {
                    continue;
                };
                // diffusers' EMAModel counts updates from 0, where it copies: min(decay, (1 + t) / (10 + t)) after.
                let t = step as f64;
                let keep = if step == 0 {
                    0.0
                } else {
                    decay.min((1.0 + t) / (10.0 + t))
                };
                let average = average.get_mut(key).unwrap();
                for (a, w) in average.iter_mut().zip(recorded(key)) {
                    *a = keep * *a + (1.0 - keep) * w;
                }
                let ema = &found[&format!("{EMA}m/{key}")];
                assert_near(&what("moving average of "), ema, average, 2e-6, 1e-6);
            }
        }
    }
}

#[test]
fn an_update_that_is_not_finite_leaves_all_state_bit_for_bit() {
    let golden = Golden::read("adamw.safetensors");
    let session = cpu_session(1);
    let options = OptimizerOptions {
        ema_decay: Some(0.9),
        ..options(&golden, "clipped")
    };
    let mut run = Run::new(&session, &golden, &options);
    run.step(&golden, 0, 1e-2, 0.5);
    run.step(&golden, 1, 1e-2, 0.5);
    let before = run.carried();
    assert_eq!(
        before.len(),
        9,
        "2 weights, 2 x 2 moments, 2 averages, 1 counter"
    );
    for loss in [f32::NAN, f32::INFINITY] {
        let found = run.step(&golden, 2, 1e-2, loss);
        assert_eq!(found["finite"].to_f64_vec().unwrap(), [0.0]);
        assert_eq!(run.carried(), before, "a loss of {loss}");
    }
    // A finite loss with an infinite gradient.
    let shape = run.state["grad_bias"].shape.clone();
    let infinite = HostTensor::from_f64(shape, &[0.0, f64::INFINITY, 0.0, 1.0]).unwrap();
    run.state.insert("grad_bias".to_string(), infinite);
    run.state.insert(
        "loss".to_string(),
        HostTensor::scalar_f32(DType::F32, 0.5).unwrap(),
    );
    let found = run.run();
    assert_eq!(found["finite"].to_f64_vec().unwrap(), [0.0]);
    assert_eq!(run.carried(), before, "an infinite gradient");
    // The next good step goes on as if the bad ones had not been.
    let found = run.step(&golden, 2, 1e-2, 0.5);
    assert_eq!(found[UPDATES].to_f64_vec().unwrap(), [3.0]);
    let recorded = &golden.values("out/clipped/weight")[24..36];
    assert_near("weight", &found["m/weight"], recorded, 1e-6, 1e-6);
}

#[test]
fn max_grad_value_clips_each_element() {
    let golden = Golden::read("adamw.safetensors");
    let session = cpu_session(1);
    let options = OptimizerOptions {
        max_grad_value: Some(0.5),
        ..options(&golden, "plain")
    };
    let mut run = Run::new(&session, &golden, &options);
    // Step 2 has the largest gradients; from zero moments, m is (1 - b1) g.
    let found = run.step(&golden, 2, 1e-2, 0.5);
    let gradient = &golden.values("in/grad_weight")[24..36];
    assert!(gradient.iter().any(|g| g.abs() > 0.5) && gradient.iter().any(|g| g.abs() < 0.5));
    let expected: Vec<f64> = gradient.iter().map(|g| 0.1 * g.clamp(-0.5, 0.5)).collect();
    let m = &found[&format!("{FIRST_MOMENT}m/weight")];
    assert_near("m", m, &expected, 1e-8, 1e-6);

    // The norm is clipped after the elements: optax.chain(clip(0.5), clip_by_global_norm(0.25)).
    let limit = 0.25;
    let options = OptimizerOptions {
        max_grad_norm: Some(limit),
        ..options
    };
    let mut run = Run::new(&session, &golden, &options);
    let found = run.step(&golden, 2, 1e-2, 0.5);
    let bias = &golden.values("in/grad_bias")[8..12];
    let clipped = gradient.iter().chain(bias).map(|g| g.clamp(-0.5, 0.5));
    let norm = clipped.map(|g| g * g).sum::<f64>().sqrt();
    assert!(norm > limit);
    let expected: Vec<f64> = expected.iter().map(|m| m * limit / norm).collect();
    let m = &found[&format!("{FIRST_MOMENT}m/weight")];
    assert_near("m", m, &expected, 1e-8, 1e-6);
}

//! The optimizers beside AdamW in float32 against their authors' code, and rounding at random.

use maxdiff::dtype::DType;
use maxdiff::host_tensor::HostTensor;
use maxdiff::runtime::Session;
use maxdiff::shape::Shape;
use maxdiff::train::optimizer::{
    AdamOptions, FIRST_MOMENT, Optimizer, OptimizerOptions, SECOND_MOMENT,
};

use maxdiff::train::schedule::{Decay, LearningRate};

use super::{Run, assert_near, recorded};
use crate::common::{Golden, cpu_session};

fn golden() -> Golden {
    Golden::read("optimizers.safetensors")
}

fn options(optimizer: Optimizer, weight_decay: f64) -> OptimizerOptions {
    OptimizerOptions {
        optimizer,
        weight_decay,
        decays_vectors: true,
        accumulated: 1,
        stochastic_rounding: false,
        max_grad_value: None,
        max_grad_norm: None,
        ema_decay: None,
    }
}

/// The optimizer of a recorded case, and its weight decay.
fn of_case(golden: &Golden, name: &str) -> OptimizerOptions {
    let case = &golden.meta["cases"][name];
    let number = |key: &str| case[key].as_f64().unwrap();
    let is = |key: &str| case[key].as_bool().unwrap();
    let adam = || AdamOptions {
        b1: number("b1"),
        b2: number("b2"),
        eps: number("eps"),
    };
    let optimizer = match name {
        "lion" => Optimizer::Lion {
            b1: number("b1"),
            b2: number("b2"),
            moment: DType::F32,
        },
        "adafactor" | "adafactor_scaled" => Optimizer::Adafactor {
            scale_parameter: is("scale_parameter"),
        },
        "adamw8bit" => Optimizer::AdamW8bit { adam: adam() },
        _ => Optimizer::Prodigy {
            adam: adam(),
            d_coef: number("d_coef"),
            use_bias_correction: is("use_bias_correction"),
            safeguard_warmup: is("safeguard_warmup"),
        },
    };
    options(optimizer, number("weight_decay"))
}

/// A run of a recorded case on the weights `keys`.
fn run<'a>(session: &'a Session, golden: &Golden, name: &str, keys: &[&str]) -> Run<'a> {
    run_with(session, golden, &of_case(golden, name), keys)
}

fn run_with<'a>(
    session: &'a Session,
    golden: &Golden,
    options: &OptimizerOptions,
    keys: &[&str],
) -> Run<'a> {
    let weights: Vec<(String, Shape)> = keys
        .iter()
        .map(|key| {
            let dims = golden.dims(&format!("in/{key}"));
            ((*key).to_owned(), Shape::new(DType::F32, dims))
        })
        .collect();
    let value = |key: &str, shape: &Shape| golden.tensor(&format!("in/{key}"), shape);
    Run::of(session, &weights, options, &value)
}

fn rates(golden: &Golden, name: &str) -> Vec<f32> {
    let rates = golden.meta["cases"][name]["lr"].as_array().unwrap();
    rates.iter().map(|r| r.as_f64().unwrap() as f32).collect()
}

#[test]
fn lion_adafactor_and_prodigy_are_those_of_their_authors() {
    let golden = golden();
    let session = cpu_session(1);
    for (name, gradients, states) in [
        ("lion", "grad", &[("exp_avg", "optimizer/m/")][..]),
        (
            "adafactor",
            "grad",
            &[
                ("exp_avg_sq_row", "optimizer/v_row/"),
                ("exp_avg_sq_col", "optimizer/v_col/"),
                ("exp_avg_sq", "optimizer/v/"),
            ],
        ),
        ("adafactor_scaled", "grad", &[]),
        (
            "prodigy",
            "steady",
            &[
                ("exp_avg", "optimizer/m/"),
                ("exp_avg_sq", "optimizer/v/"),
                ("s", "optimizer/s/"),
                ("p0", "optimizer/p0/"),
            ],
        ),
        ("prodigy_guarded", "steady", &[("s", "optimizer/s/")]),
    ] {
        let keys = ["weight", "bias", "conv"];
        let mut run = run(&session, &golden, name, &keys);
        for (step, rate) in rates(&golden, name).into_iter().enumerate() {
            let found = run.step_on(rate, 0.5, &|key, shape| {
                recorded(&golden, &format!("in/{gradients}_{key}"), step, shape)
            });
            for key in keys {
                let weight = &found[&format!("m/{key}")];
                let place = format!("out/{name}/{key}");
                let expected = recorded(&golden, &place, step, &weight.shape);
                let what = format!("{name} step {step} {key}");
                assert_near(&what, weight, &expected.to_f64_vec().unwrap(), 1e-6, 1e-6);
            }
        }
        // Prodigy's estimate, which its state is scaled by, is of ways of 1e-6 that weights went, which float32 holds to 6e-8.
        let relative = match name.starts_with("prodigy") {
            true => 3e-4,
            false => 4e-6,
        };
        let mut compared = 0;
        for (state, prefix) in states {
            for key in keys {
                let place = format!("out/{name}/{state}_{key}");
                if golden.has(&place) {
                    let found = &run.state[&format!("{prefix}m/{key}")];
                    assert_near(&place, found, golden.values(&place), 1e-9, relative);
                    compared += 1;
                }
            }
        }
        assert!(compared >= states.len(), "{name}: {compared} states");
        if golden.has(&format!("out/{name}/d")) {
            let d = &run.state["optimizer/d"];
            assert_near(
                name,
                d,
                golden.values(&format!("out/{name}/d")),
                0.0,
                relative,
            );
        }
    }
}

/// Warm-up over 3 steps of 14, as the metadata says.
#[test]
fn learning_rates_are_those_of_diffusers() {
    let golden = golden();
    let number = |key: &str| golden.meta["rates"][key].as_f64().unwrap();
    let count = |key: &str| golden.meta["rates"][key].as_u64().unwrap();
    for decay in Decay::ALL {
        let rate = LearningRate {
            peak: number("peak"),
            warmup_steps: count("warmup_steps"),
            total_steps: count("total_steps"),
            decay,
            num_cycles: count("num_cycles"),
            power: number("power"),
        };
        let place = format!("out/rates/{decay}");
        if decay == Decay::Rex {
            assert!(!golden.has(&place), "diffusers has it now");
            continue;
        }
        for (step, expected) in golden.values(&place).iter().enumerate() {
            let found = rate.at(step as u64);
            assert!(
                (found - expected).abs() < 3e-8,
                "{decay} {step}: {found} {expected}"
            );
        }
    }
}

/// Norms and biases without decay are as with none; all else is as with all decaying.
#[test]
fn weights_of_one_dimension_decay_only_if_asked() {
    let golden = golden();
    let session = cpu_session(1);
    for name in ["lion", "adafactor", "adamw8bit", "prodigy"] {
        let all = of_case(&golden, name);
        let none = OptimizerOptions {
            weight_decay: 0.0,
            ..all
        };
        let matrices = OptimizerOptions {
            decays_vectors: false,
            ..all
        };
        let run = |options: &OptimizerOptions| {
            let keys = ["weight", "bias"];
            let mut run = run_with(&session, &golden, options, &keys);
            run.step(&golden, 0, 1e-2, 0.5);
            keys.map(|key| run.state[&format!("m/{key}")].clone())
        };
        let [all, none, matrices] = [run(&all), run(&none), run(&matrices)];
        assert!(
            all[0] != none[0] && all[1] != none[1] || name == "prodigy",
            "{name}"
        );
        assert_eq!([&matrices[0], &matrices[1]], [&all[0], &none[1]], "{name}");
    }
}

/// A code is another where what it stands for lies in the middle between two values up to rounding; all that follows
/// from such a code is other too.
#[test]
fn adamw_in_8_bits_is_that_of_bitsandbytes() {
    let golden = golden();
    let session = cpu_session(1);
    let mut run = run(&session, &golden, "adamw8bit", &["large", "bias"]);
    for (step, rate) in rates(&golden, "adamw8bit").into_iter().enumerate() {
        let found = run.step(&golden, step, rate, 0.5);
        let bias = &found["m/bias"];
        let expected = recorded(&golden, "out/adamw8bit/bias", step, &bias.shape);
        assert_near("bias", bias, &expected.to_f64_vec().unwrap(), 1e-6, 1e-6);
        let large = &found["m/large"];
        let expected = recorded(&golden, "out/adamw8bit/large", step, &large.shape);
        let [found, expected] = [large, &expected].map(|t| t.to_f64_vec().unwrap());
        let errors = found.iter().zip(&expected).map(|(f, e)| (f - e).abs());
        let far: Vec<f64> = errors.filter(|error| *error > 1e-6).collect();
        assert!(far.len() <= 4, "step {step}: {} of 4400 differ", far.len());
        assert!(
            far.iter().all(|error| *error < 1e-3),
            "step {step}: {far:?}"
        );
    }
    for (prefix, recorded) in [("m", 1), ("v", 2)] {
        let codes = &run.state[&format!("optimizer/{prefix}/m/large")];
        assert_eq!(codes.shape.dtype, DType::U8);
        let codes = codes.to_f64_vec().unwrap();
        let expected = golden.values(&format!("out/adamw8bit/state{recorded}_large"));
        let other = codes.iter().zip(expected).filter(|(f, e)| f != e).count();
        assert!(other <= 4, "{prefix}: {other} codes of 4400 differ");
        let largest = &run.state[&format!("optimizer/{prefix}_absmax/m/large")];
        let expected = golden.values(&format!("out/adamw8bit/absmax{recorded}_large"));
        assert_near(prefix, largest, expected, 0.0, 1e-5);
    }
    // Fewer than 4096 elements have their moments in float32.
    assert_eq!(run.state["optimizer/m/m/bias"].shape.dtype, DType::F32);
}

/// Weights of 1 in bfloat16 with steps of 0.001, a quarter of the distance to the next number.
#[test]
fn rounding_at_random_follows_small_updates_on_average() {
    let session = cpu_session(1);
    let weights = [("weight".to_owned(), Shape::new(DType::BF16, [64, 64]))];
    let value = |_: &str, shape: &Shape| HostTensor::from_f64(shape.clone(), &[1.0; 4096]).unwrap();
    let adam = AdamOptions {
        b1: 0.9,
        b2: 0.999,
        eps: 1e-8,
    };
    let gradients: Vec<f64> = (0..4096).map(|i| 1.0 + f64::from(i) / 4096.0).collect();
    let mean = |tensor: &HostTensor| {
        let values = tensor.to_f64_vec().unwrap();
        values.iter().sum::<f64>() / values.len() as f64
    };
    for rounds in [false, true] {
        let moments = match rounds {
            true => DType::BF16,
            false => DType::F32,
        };
        let options = OptimizerOptions {
            stochastic_rounding: rounds,
            ..options(Optimizer::AdamW { adam, moments }, 0.0)
        };
        let mut run = Run::of(&session, &weights, &options, &value);
        for step in 0..20 {
            let key = HostTensor::from_f64(Shape::scalar(DType::U32), &[f64::from(step)]).unwrap();
            run.state.insert("key".to_owned(), key);
            run.step_on(1e-3, 0.5, &|_, shape| {
                HostTensor::from_f64(shape.clone(), &gradients).unwrap()
            });
            if step > 0 {
                continue;
            }
            for (prefix, factor) in [(FIRST_MOMENT, 0.1), (SECOND_MOMENT, 0.001)] {
                let stored = &run.state[&format!("{prefix}m/weight")];
                assert_eq!(stored.shape.dtype, moments);
                let mut up = 0;
                for (stored, g) in stored.to_f64_vec().unwrap().iter().zip(&gradients) {
                    let exact = match prefix {
                        FIRST_MOMENT => factor * g,
                        _ => factor * g * g,
                    };
                    // bfloat16 has 8 bits: neighbours are at most 2^-7 apart, relatively.
                    let limit = if rounds { 2f64.powi(-7) } else { 1e-6 };
                    assert!((stored - exact).abs() < limit * exact, "{stored} {exact}");
                    up += usize::from(*stored > exact);
                }
                assert!(
                    !rounds || (1800..2300).contains(&up),
                    "{up} of 4096 rounded up"
                );
            }
        }
        let moved = 1.0 - mean(&run.state["m/weight"]);
        match rounds {
            // 20 roundings of deviation 0.0017 at most, of 4096 weights: 5 sigma.
            true => assert!((moved - 0.02).abs() < 6e-4, "{moved}"),
            false => assert_eq!(moved, 0.0),
        }
        // 1 - 0.9^20 and 1 - 0.999^20 of the means.
        let square = gradients.iter().map(|g| g * g).sum::<f64>() / 4096.0;
        let m = mean(&run.state[&format!("{FIRST_MOMENT}m/weight")]);
        let v = mean(&run.state[&format!("{SECOND_MOMENT}m/weight")]);
        assert!((m / (0.878_423 * 1.499_878) - 1.0).abs() < 1e-3, "{m}");
        assert!((v / (0.019_811 * square) - 1.0).abs() < 1e-3, "{v}");
    }
}

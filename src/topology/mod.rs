//! Accelerator names and the chips behind them.

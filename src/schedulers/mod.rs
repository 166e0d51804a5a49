//! Noise schedules and samplers.

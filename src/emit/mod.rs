//! StableHLO text with Shardy shardings.

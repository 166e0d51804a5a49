//! The typed configuration: schema, YAML, overrides.

//! Messages of `proto/`, one module for each protobuf package.

#![allow(missing_docs, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/messages.rs"));

//! The TPU compiler's backend: kernels of this program, as Mosaic text in the module that calls them.

mod attention;
mod claim;
pub mod mosaic;
mod product;

pub use attention::Attention;
pub use claim::claim;
pub use product::Product;

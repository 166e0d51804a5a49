// Stands in for MLIR's header of the same name.
//
// XLA's client headers name `mlir::ModuleOp` in signatures that this plugin never calls; MLIR's own
// header needs LLVM's, which the TensorFlow wheel leaves out. Only the names and the size of
// the handle (one pointer) matter here.
#ifndef MAXDIFF_PLUGIN_STUBS_MLIR_IR_BUILTINOPS_H_
#define MAXDIFF_PLUGIN_STUBS_MLIR_IR_BUILTINOPS_H_

namespace mlir {

class MLIRContext;
class DialectRegistry;

class ModuleOp {
 public:
  ModuleOp() = default;

 private:
  void* operation_ = nullptr;
};

template <class Op>
class OwningOpRef {
 private:
  Op op_;
};

}  // namespace mlir

#endif  // MAXDIFF_PLUGIN_STUBS_MLIR_IR_BUILTINOPS_H_

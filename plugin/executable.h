// Compilation, PJRT_Executable_* and PJRT_LoadedExecutable_*.
#ifndef MAXDIFF_PLUGIN_EXECUTABLE_H_
#define MAXDIFF_PLUGIN_EXECUTABLE_H_

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "objects.h"
#include "xla/hlo/builder/xla_computation.h"
#include "xla/hlo/ir/hlo_module.h"
#include "xla/layout.h"
#include "xla/shape_util.h"
#include "xla/pjrt/proto/compile_options.pb.h"

namespace xla {

// From xla/pjrt/mlir_to_hlo.h, which cannot be included without LLVM's headers.
absl::Status ParseMlirModuleStringAndConvertToXlaComputation(absl::string_view mlir_module_str,
                                                             XlaComputation& xla_computation,
                                                             bool use_tuple_args,
                                                             bool return_tuple);

}  // namespace xla

namespace maxdiff {

inline absl::StatusOr<xla::CompileOptions> ParseCompileOptions(const char* bytes, size_t size) {
  if (size > 0) MAXDIFF_RETURN_IF_ERROR(CheckNotNull(bytes, "compile_options"));
  xla::CompileOptionsProto proto;
  if (size > static_cast<size_t>(std::numeric_limits<int>::max()) ||
      !proto.ParseFromArray(bytes, static_cast<int>(size))) {
    return absl::InvalidArgumentError(
        absl::StrCat("compile_options: ", size, " bytes that are not a CompileOptionsProto"));
  }
  const xla::ExecutableBuildOptionsProto& build = proto.executable_build_options();
  if (build.num_replicas() < 1 || build.num_partitions() < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compile_options: num_replicas is ", build.num_replicas(), " and num_partitions ",
        build.num_partitions(), ", both must be at least 1"));
  }
  MAXDIFF_ASSIGN_OR_RETURN(xla::CompileOptions options, xla::CompileOptions::FromProto(proto));
  // XLA:CPU of TensorFlow 2.21 ends the process when it loads a serialized program with a convolution that it had given
  // to YNNPACK: YnnFusionThunkFromProto takes every one that is no dot for a fusion. Its own convolutions are as fast.
  auto* types = options.executable_build_options.mutable_debug_options()->mutable_xla_cpu_experimental_ynn_fusion_type();
  types->erase(std::remove(types->begin(), types->end(),
                           xla::DebugOptions::LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION),
               types->end());
  return options;
}

inline absl::StatusOr<xla::XlaComputation> ParseProgram(const PJRT_Program* program) {
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(program, "program"));
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(program->code, "program->code"));
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(program->format, "program->format"));
  const absl::string_view format(program->format, program->format_size);
  const absl::string_view code(program->code, program->code_size);
  if (format == "mlir") {
    xla::XlaComputation computation;
    MAXDIFF_RETURN_IF_ERROR(xla::ParseMlirModuleStringAndConvertToXlaComputation(
        code, computation, /*use_tuple_args=*/false, /*return_tuple=*/false));
    return computation;
  }
  if (format == "hlo") {
    xla::HloModuleProto proto;
    if (code.size() > static_cast<size_t>(std::numeric_limits<int>::max()) ||
        !proto.ParseFromArray(code.data(), static_cast<int>(code.size()))) {
      return absl::InvalidArgumentError(
          absl::StrCat("program: ", code.size(), " bytes that are not an HloModuleProto"));
    }
    return xla::XlaComputation(std::move(proto));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("program format '", format, "' is not one of mlir, hlo"));
}

// The number of leaves of a program's result: its outputs on each device.
inline size_t CountOutputs(const xla::Shape& result) {
  if (!result.IsTuple()) return 1;
  return result.tuple_shapes().size();
}

inline absl::StatusOr<std::shared_ptr<xla::HloModule>> OnlyModule(
    const xla::PjRtLoadedExecutable& executable) {
  MAXDIFF_ASSIGN_OR_RETURN(auto modules, executable.GetHloModules());
  if (modules.size() != 1) {
    return absl::UnimplementedError(
        absl::StrCat("the executable has ", modules.size(), " HLO modules, expected one (SPMD)"));
  }
  return modules.front();
}

inline absl::StatusOr<PJRT_LoadedExecutable*> NewLoadedExecutable(
    PJRT_Client* client, std::unique_ptr<xla::PjRtLoadedExecutable> source) {
  auto loaded = std::make_unique<PJRT_LoadedExecutable>();
  loaded->client = client;
  loaded->executable = std::move(source);
  for (xla::PjRtDevice* device : loaded->executable->addressable_devices()) {
    loaded->addressable_devices.push_back(client->device_of.at(device));
  }
  MAXDIFF_ASSIGN_OR_RETURN(std::shared_ptr<xla::HloModule> module,
                           OnlyModule(*loaded->executable));
  for (const xla::HloInstruction* parameter :
       module->entry_computation()->parameter_instructions()) {
    loaded->parameter_shapes.push_back(parameter->shape());
  }
  return loaded.release();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_Compile) {
  MAXDIFF_CHECK_ARG(client);
  MAXDIFF_ASSIGN_OR_RETURN(xla::CompileOptions options,
                           ParseCompileOptions(args->compile_options, args->compile_options_size));
  MAXDIFF_ASSIGN_OR_RETURN(xla::XlaComputation computation, ParseProgram(args->program));
  MAXDIFF_ASSIGN_OR_RETURN(
      std::unique_ptr<xla::PjRtLoadedExecutable> executable,
      args->client->client->CompileAndLoad(computation, std::move(options)));
  MAXDIFF_ASSIGN_OR_RETURN(args->executable,
                           NewLoadedExecutable(args->client, std::move(executable)));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_DeserializeAndLoad) {
  MAXDIFF_CHECK_ARG(client);
  MAXDIFF_CHECK_ARG(serialized_executable);
  std::optional<xla::CompileOptions> options;
  if (args->overridden_serialized_compile_options != nullptr) {
    MAXDIFF_ASSIGN_OR_RETURN(
        options, ParseCompileOptions(args->overridden_serialized_compile_options,
                                     args->overridden_serialized_compile_options_size));
  }
  MAXDIFF_ASSIGN_OR_RETURN(
      std::unique_ptr<xla::PjRtLoadedExecutable> executable,
      args->client->client->LoadSerializedExecutable(
          absl::string_view(args->serialized_executable, args->serialized_executable_size),
          std::move(options), xla::LoadOptions()));
  MAXDIFF_ASSIGN_OR_RETURN(args->loaded_executable,
                           NewLoadedExecutable(args->client, std::move(executable)));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_Destroy) {
  delete args->executable;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_Name) {
  MAXDIFF_CHECK_ARG(executable);
  absl::string_view name = args->executable->executable->name();
  args->executable_name = name.data();
  args->executable_name_size = name.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_NumReplicas) {
  MAXDIFF_CHECK_ARG(executable);
  args->num_replicas = args->executable->executable->num_replicas();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_NumPartitions) {
  MAXDIFF_CHECK_ARG(executable);
  args->num_partitions = args->executable->executable->num_partitions();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_NumOutputs) {
  MAXDIFF_CHECK_ARG(executable);
  MAXDIFF_ASSIGN_OR_RETURN(std::shared_ptr<xla::HloModule> module,
                           OnlyModule(*args->executable->executable));
  args->num_outputs = CountOutputs(module->result_shape());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_SizeOfGeneratedCodeInBytes) {
  MAXDIFF_CHECK_ARG(executable);
  args->size_in_bytes = args->executable->executable->SizeOfGeneratedCodeInBytes();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_GetCostAnalysis) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  if (!args->executable->cost_analysis.has_value()) {
    MAXDIFF_ASSIGN_OR_RETURN(auto properties, args->executable->executable->GetCostAnalysis());
    args->executable->cost_analysis.emplace().AddAll(properties);
  }
  args->properties = args->executable->cost_analysis->data();
  args->num_properties = args->executable->cost_analysis->size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_GetCompiledMemoryStats) {
  MAXDIFF_CHECK_ARG(executable);
  MAXDIFF_ASSIGN_OR_RETURN(xla::CompiledMemoryStats stats,
                           args->executable->executable->GetCompiledMemoryStats());
  args->generated_code_size_in_bytes = stats.generated_code_size_in_bytes;
  args->argument_size_in_bytes = stats.argument_size_in_bytes;
  args->output_size_in_bytes = stats.output_size_in_bytes;
  args->alias_size_in_bytes = stats.alias_size_in_bytes;
  args->temp_size_in_bytes = stats.temp_size_in_bytes;
  args->host_generated_code_size_in_bytes = stats.host_generated_code_size_in_bytes;
  args->host_argument_size_in_bytes = stats.host_argument_size_in_bytes;
  args->host_output_size_in_bytes = stats.host_output_size_in_bytes;
  args->host_alias_size_in_bytes = stats.host_alias_size_in_bytes;
  args->host_temp_size_in_bytes = stats.host_temp_size_in_bytes;
  args->peak_memory_in_bytes = stats.peak_memory_in_bytes;
  args->total_size_in_bytes = stats.total_size_in_bytes;
  return absl::OkStatus();
}

// Types, dimensions and memory kinds of the outputs, in order.
inline absl::Status FillOutputs(PJRT_Executable* executable) {
  if (executable->output_types.has_value()) return absl::OkStatus();
  MAXDIFF_ASSIGN_OR_RETURN(std::shared_ptr<xla::HloModule> module,
                           OnlyModule(*executable->executable));
  const xla::Shape& result = module->result_shape();
  std::vector<const xla::Shape*> shapes;
  if (result.IsTuple()) {
    for (const xla::Shape& shape : result.tuple_shapes()) shapes.push_back(&shape);
  } else {
    shapes.push_back(&result);
  }
  std::vector<PJRT_Buffer_Type> types;
  std::vector<size_t> ranks;
  std::vector<const char*> kinds;
  for (const xla::Shape* shape : shapes) {
    types.push_back(ToCType(shape->element_type()));
    const bool array = shape->IsArray();
    ranks.push_back(array ? shape->dimensions().size() : 0);
    if (array) {
      executable->output_dims.insert(executable->output_dims.end(), shape->dimensions().begin(),
                                     shape->dimensions().end());
    }
    const bool on_host = array && shape->has_layout() &&
                         shape->layout().memory_space() == xla::Layout::kHostMemorySpace;
    const absl::string_view kind = on_host ? "pinned_host" : "device";
    kinds.push_back(kind.data());
    executable->memory_kind_sizes.push_back(kind.size());
  }
  executable->output_types = std::move(types);
  executable->output_ranks = std::move(ranks);
  executable->memory_kinds = std::move(kinds);
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_OutputElementTypes) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  MAXDIFF_RETURN_IF_ERROR(FillOutputs(args->executable));
  args->output_types = args->executable->output_types->data();
  args->num_output_types = args->executable->output_types->size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_OutputDimensions) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  MAXDIFF_RETURN_IF_ERROR(FillOutputs(args->executable));
  args->num_outputs = args->executable->output_ranks->size();
  args->dims = args->executable->output_dims.data();
  args->dim_sizes = args->executable->output_ranks->data();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_OutputMemoryKinds) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  MAXDIFF_RETURN_IF_ERROR(FillOutputs(args->executable));
  args->num_outputs = args->executable->memory_kinds->size();
  args->memory_kinds = args->executable->memory_kinds->data();
  args->memory_kind_sizes = args->executable->memory_kind_sizes.data();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_OptimizedProgram) {
  MAXDIFF_CHECK_ARG(executable);
  MAXDIFF_CHECK_ARG(program);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  std::optional<std::string>& bytes = args->executable->optimized_program;
  if (!bytes.has_value()) {
    MAXDIFF_ASSIGN_OR_RETURN(std::shared_ptr<xla::HloModule> module,
                             OnlyModule(*args->executable->executable));
    std::string serialized;
    if (!module->ToProtoWithConfig().SerializeToString(&serialized)) {
      return absl::ResourceExhaustedError("the optimized program does not fit a protobuf message");
    }
    bytes = std::move(serialized);
  }
  static constexpr absl::string_view kFormat = "hlo_with_config";
  args->program->format = kFormat.data();
  args->program->format_size = kFormat.size();
  if (args->program->code == nullptr) {
    args->program->code_size = bytes->size();
    return absl::OkStatus();
  }
  if (args->program->code_size < bytes->size()) {
    return absl::InvalidArgumentError(absl::StrCat("program->code_size is ",
                                                   args->program->code_size, ", needed ",
                                                   bytes->size()));
  }
  bytes->copy(args->program->code, bytes->size());
  args->program->code_size = bytes->size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_Serialize) {
  MAXDIFF_CHECK_ARG(executable);
  MAXDIFF_ASSIGN_OR_RETURN(std::string bytes,
                           args->executable->executable->SerializeExecutable());
  auto* holder = new PJRT_SerializedExecutable{std::move(bytes)};
  args->serialized_bytes = holder->bytes.data();
  args->serialized_bytes_size = holder->bytes.size();
  args->serialized_executable = holder;
  args->serialized_executable_deleter = [](PJRT_SerializedExecutable* bytes) { delete bytes; };
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_GetCompileOptions) {
  MAXDIFF_CHECK_ARG(executable);
  MAXDIFF_ASSIGN_OR_RETURN(xla::CompileOptions options,
                           args->executable->executable->GetCompileOptions());
  MAXDIFF_ASSIGN_OR_RETURN(xla::CompileOptionsProto proto, options.ToProto());
  auto* holder = new PJRT_SerializedCompileOptions{proto.SerializeAsString()};
  args->serialized_bytes = holder->bytes.data();
  args->serialized_bytes_size = holder->bytes.size();
  args->serialized_compile_options = holder;
  args->serialized_compile_options_deleter = [](PJRT_SerializedCompileOptions* bytes) {
    delete bytes;
  };
  return absl::OkStatus();
}

// XLA:CPU leaves its own fingerprint empty for most programs; then the optimized module's is taken.
inline absl::StatusOr<std::string> Fingerprint(const xla::PjRtLoadedExecutable& executable) {
  absl::StatusOr<std::string> own = executable.FingerprintExecutable();
  if (own.ok() && !own->empty()) return own;
  MAXDIFF_ASSIGN_OR_RETURN(std::shared_ptr<xla::HloModule> module, OnlyModule(executable));
  return module->GetFingerprint128();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Executable_Fingerprint) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  if (!args->executable->fingerprint.has_value()) {
    MAXDIFF_ASSIGN_OR_RETURN(args->executable->fingerprint,
                             Fingerprint(*args->executable->executable));
  }
  args->executable_fingerprint = args->executable->fingerprint->data();
  args->executable_fingerprint_size = args->executable->fingerprint->size();
  return absl::OkStatus();
}

// The executable behind the handle, kept alive for the caller even when another thread deletes it.
inline absl::StatusOr<std::shared_ptr<xla::PjRtLoadedExecutable>> Live(
    PJRT_LoadedExecutable* loaded) {
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(loaded, "executable"));
  std::lock_guard<std::mutex> lock(loaded->mutex);
  if (loaded->executable == nullptr) {
    return absl::FailedPreconditionError("the executable has been deleted");
  }
  return loaded->executable;
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_Destroy) {
  delete args->executable;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_GetExecutable) {
  MAXDIFF_ASSIGN_OR_RETURN(auto executable, Live(args->loaded_executable));
  auto* wrapper = new PJRT_Executable{};
  wrapper->executable = std::move(executable);
  args->executable = wrapper;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_AddressableDevices) {
  MAXDIFF_CHECK_ARG(executable);
  args->addressable_devices = args->executable->addressable_devices.data();
  args->num_addressable_devices = args->executable->addressable_devices.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_GetDeviceAssignment) {
  MAXDIFF_ASSIGN_OR_RETURN(auto executable, Live(args->executable));
  xla::DeviceAssignmentProto proto;
  executable->device_assignment().Serialize(&proto);
  auto* holder = new PJRT_DeviceAssignmentSerialized{proto.SerializeAsString()};
  args->serialized_bytes = holder->bytes.data();
  args->serialized_bytes_size = holder->bytes.size();
  args->serialized_device_assignment = holder;
  args->serialized_device_assignment_deleter = [](PJRT_DeviceAssignmentSerialized* bytes) {
    delete bytes;
  };
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_Delete) {
  MAXDIFF_CHECK_ARG(executable);
  std::shared_ptr<xla::PjRtLoadedExecutable> released;
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  released.swap(args->executable->executable);
  if (released != nullptr) released->Delete();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_IsDeleted) {
  MAXDIFF_CHECK_ARG(executable);
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  args->is_deleted = args->executable->executable == nullptr;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_Fingerprint) {
  MAXDIFF_ASSIGN_OR_RETURN(auto executable, Live(args->executable));
  std::lock_guard<std::mutex> lock(args->executable->mutex);
  if (!args->executable->fingerprint.has_value()) {
    MAXDIFF_ASSIGN_OR_RETURN(args->executable->fingerprint, Fingerprint(*executable));
  }
  args->executable_fingerprint = args->executable->fingerprint->data();
  args->executable_fingerprint_size = args->executable->fingerprint->size();
  return absl::OkStatus();
}

inline absl::StatusOr<xla::ExecuteOptions> ToExecuteOptions(const PJRT_ExecuteOptions* source,
                                                            size_t num_args) {
  xla::ExecuteOptions options;
  if (source == nullptr) return options;
  if (source->num_send_ops != 0 || source->num_recv_ops != 0) {
    return absl::UnimplementedError("send and receive callbacks are not supported by the CPU plugin");
  }
  if (source->context != nullptr) {
    return absl::UnimplementedError("execute contexts are not supported by the CPU plugin");
  }
  options.launch_id = source->launch_id;
  if (source->num_non_donatable_input_indices > 0) {
    MAXDIFF_RETURN_IF_ERROR(
        CheckNotNull(source->non_donatable_input_indices, "non_donatable_input_indices"));
  }
  for (size_t i = 0; i < source->num_non_donatable_input_indices; ++i) {
    const int64_t index = source->non_donatable_input_indices[i];
    if (index < 0 || static_cast<size_t>(index) >= num_args) {
      return absl::InvalidArgumentError(
          absl::StrCat("non-donatable input ", index, " of ", num_args, " inputs"));
    }
    options.non_donatable_input_indices.insert(static_cast<int>(index));
  }
  if (source->call_location != nullptr) options.call_location = source->call_location;
  return options;
}

// XLA:CPU compares sizes in bytes only, so that an int32 array would pass for a float32 one.
inline absl::Status CheckArgument(const PJRT_Buffer* buffer, const xla::Shape& expected) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(buffer));
  const xla::Shape& shape = buffer->buffer->on_device_shape();
  if (expected.IsArray() && expected.is_static() &&
      !xla::ShapeUtil::Compatible(shape, expected)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected ", xla::ShapeUtil::HumanString(expected), ", got ",
                     xla::ShapeUtil::HumanString(shape)));
  }
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_LoadedExecutable_Execute) {
  MAXDIFF_ASSIGN_OR_RETURN(auto executable, Live(args->executable));
  MAXDIFF_CHECK_ARG(output_lists);
  PJRT_LoadedExecutable* loaded = args->executable;
  if (args->num_args != loaded->parameter_shapes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(executable->name(), " takes ",
                                                   loaded->parameter_shapes.size(),
                                                   " arguments, got ", args->num_args));
  }
  const size_t expected_devices =
      args->execute_device != nullptr ? 1 : loaded->addressable_devices.size();
  if (args->num_devices != expected_devices) {
    return absl::InvalidArgumentError(absl::StrCat(executable->name(), " runs on ",
                                                   expected_devices,
                                                   " devices, got arguments for ",
                                                   args->num_devices));
  }
  MAXDIFF_ASSIGN_OR_RETURN(xla::ExecuteOptions options,
                           ToExecuteOptions(args->options, args->num_args));
  if (args->num_args > 0) MAXDIFF_CHECK_ARG(argument_lists);
  std::vector<std::vector<xla::PjRtBuffer*>> arguments(args->num_devices);
  for (size_t device = 0; device < args->num_devices; ++device) {
    arguments[device].reserve(args->num_args);
    for (size_t i = 0; i < args->num_args; ++i) {
      MAXDIFF_CHECK_ARG(argument_lists[device]);
      PJRT_Buffer* buffer = args->argument_lists[device][i];
      if (absl::Status status = CheckArgument(buffer, loaded->parameter_shapes[i]);
          !status.ok()) {
        return absl::Status(status.code(), absl::StrCat(executable->name(), ": argument ", i,
                                                        " on device ", device, ": ",
                                                        status.message()));
      }
      arguments[device].push_back(buffer->buffer.get());
    }
  }

  std::vector<std::vector<std::unique_ptr<xla::PjRtBuffer>>> results;
  std::vector<xla::Future<>> futures;
  const bool want_events = args->device_complete_events != nullptr;
  if (args->execute_device == nullptr) {
    std::optional<std::vector<xla::Future<>>> returned;
    if (want_events) returned.emplace();
    MAXDIFF_ASSIGN_OR_RETURN(results, executable->Execute(arguments, options, returned));
    if (want_events) futures = *std::move(returned);
  } else {
    xla::PjRtDevice* device = args->execute_device->device;
    std::optional<xla::Future<>> returned;
    std::vector<std::unique_ptr<xla::PjRtBuffer>> result;
    if (loaded->addressable_devices.empty()) {
      MAXDIFF_ASSIGN_OR_RETURN(result, executable->ExecutePortable(arguments[0], device, options,
                                                                   returned, want_events));
    } else {
      MAXDIFF_ASSIGN_OR_RETURN(result, executable->ExecuteSharded(arguments[0], device, options,
                                                                  returned, want_events));
    }
    results.push_back(std::move(result));
    if (want_events) futures.push_back(*std::move(returned));
  }

  for (size_t device = 0; device < results.size(); ++device) {
    for (size_t i = 0; i < results[device].size(); ++i) {
      args->output_lists[device][i] = NewBuffer(loaded->client, std::move(results[device][i]));
    }
    if (want_events) args->device_complete_events[device] = NewEvent(std::move(futures[device]));
  }
  return absl::OkStatus();
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_EXECUTABLE_H_

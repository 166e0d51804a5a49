// A PJRT plugin for the CPU: the C API over XLA's C++ CPU client, which TensorFlow's wheel carries.
//
// No wheel ships such a plugin, and TensorFlow's own C wrappers are not exported, so the functions
// are written here. Build with -DNDEBUG: with assertions on, the type ids of asynchronous values
// differ between this library and TensorFlow's.

#include <cstdlib>

#include "absl/log/globals.h"
#include "buffer.h"
#include "client.h"
#include "event.h"
#include "executable.h"
#include "isa.h"
#include "kernel_calls.h"

namespace maxdiff {

// XLA reports its choices at load and compile time on stderr; who wants them sets
// MAXDIFF_PLUGIN_LOG. The link option `-z initfirst` makes this run before TensorFlow's own
// initializers, which log already.
__attribute__((constructor)) void SilenceLogs() {
  if (std::getenv("MAXDIFF_PLUGIN_LOG") != nullptr) return;
  absl::SetMinLogLevel(absl::LogSeverityAtLeast::kFatal);
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kFatal);
}

MAXDIFF_PJRT_FUNCTION(PJRT_Plugin_Initialize) {
  const std::string& error = kernels::ChosenIsa().error;
  if (!error.empty()) return absl::InvalidArgumentError(error);
  static const absl::Status* const registered = new absl::Status(RegisterKernels());
  return *registered;
}

MAXDIFF_PJRT_FUNCTION(PJRT_Plugin_Attributes) {
  static const NamedValues* attributes = [] {
    auto* values = new NamedValues();
    values->Add("xla_version", int64_t{2});
    // The program that installed this plugin makes calls of the kernels only where this is its own
    // sources' sum: what operands a kernel takes changes with them.
    values->Add("maxdiff_sources", std::string(MAXDIFF_SOURCES));
    values->Add("maxdiff_kernels", KernelNames());
    values->Add("maxdiff_isa", kernels::IsaName());
    values->Add("maxdiff_usable_isas", kernels::IsaNames(true));
    values->Add("maxdiff_unusable_isas", kernels::IsaNames(false));
    values->Add("maxdiff_missing_features", kernels::ChosenIsa().missing);
#ifdef MAXDIFF_STABLEHLO_CURRENT
    values->Add("stablehlo_current_version", std::vector<int64_t>{MAXDIFF_STABLEHLO_CURRENT});
    values->Add("stablehlo_minimum_version", std::vector<int64_t>{MAXDIFF_STABLEHLO_MINIMUM});
#endif
    return values;
  }();
  args->attributes = attributes->data();
  args->num_attributes = attributes->size();
  return absl::OkStatus();
}

#define MAXDIFF_UNIMPLEMENTED(name)                                                      \
  PJRT_Error* name(name##_Args*) {                                                       \
    return ToError(absl::UnimplementedError(#name " is not provided by the CPU plugin")); \
  }

MAXDIFF_UNIMPLEMENTED(PJRT_Event_Create)
MAXDIFF_UNIMPLEMENTED(PJRT_Event_Set)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_CreateViewOfDeviceBuffer)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_CreateBuffersForAsyncHostToDevice)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_DmaMap)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_DmaUnmap)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_UpdateGlobalProcessInfo)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_CreateAliasBuffer)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_FulfillAliasBuffer)
MAXDIFF_UNIMPLEMENTED(PJRT_Client_CreateErrorBuffer)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_Destroy)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_TransferData)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_Device)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_BufferCount)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_BufferSize)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_SetBufferError)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_AddMetadata)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncHostToDeviceTransferManager_TransferLiteral)
MAXDIFF_UNIMPLEMENTED(PJRT_Buffer_DynamicDimensionIndices)
MAXDIFF_UNIMPLEMENTED(PJRT_Buffer_CopyRawToHostFuture)
MAXDIFF_UNIMPLEMENTED(PJRT_Buffer_DonateWithControlDependency)
MAXDIFF_UNIMPLEMENTED(PJRT_CopyToDeviceStream_Destroy)
MAXDIFF_UNIMPLEMENTED(PJRT_CopyToDeviceStream_AddChunk)
MAXDIFF_UNIMPLEMENTED(PJRT_CopyToDeviceStream_TotalBytes)
MAXDIFF_UNIMPLEMENTED(PJRT_CopyToDeviceStream_GranuleSize)
MAXDIFF_UNIMPLEMENTED(PJRT_CopyToDeviceStream_CurrentBytes)
MAXDIFF_UNIMPLEMENTED(PJRT_TopologyDescription_Create)
MAXDIFF_UNIMPLEMENTED(PJRT_TopologyDescription_Deserialize)
MAXDIFF_UNIMPLEMENTED(PJRT_Compile)
MAXDIFF_UNIMPLEMENTED(PJRT_ExecuteContext_Create)
MAXDIFF_UNIMPLEMENTED(PJRT_ExecuteContext_Destroy)
MAXDIFF_UNIMPLEMENTED(PJRT_Device_PoisonExecution)
MAXDIFF_UNIMPLEMENTED(PJRT_Device_CreateAsyncTrackingEvent)
MAXDIFF_UNIMPLEMENTED(PJRT_AsyncTrackingEvent_Destroy)

// clang-format off
#define MAXDIFF_ENTRY(name) .name = name
constexpr PJRT_Api kApi = {
    .struct_size = PJRT_Api_STRUCT_SIZE,
    .extension_start = nullptr,
    .pjrt_api_version = {
        .struct_size = PJRT_Api_Version_STRUCT_SIZE,
        .extension_start = nullptr,
        .major_version = PJRT_API_MAJOR,
        .minor_version = PJRT_API_MINOR,
    },
    MAXDIFF_ENTRY(PJRT_Error_Destroy),
    MAXDIFF_ENTRY(PJRT_Error_Message),
    MAXDIFF_ENTRY(PJRT_Error_GetCode),
    MAXDIFF_ENTRY(PJRT_Plugin_Initialize),
    MAXDIFF_ENTRY(PJRT_Plugin_Attributes),
    MAXDIFF_ENTRY(PJRT_Event_Destroy),
    MAXDIFF_ENTRY(PJRT_Event_IsReady),
    MAXDIFF_ENTRY(PJRT_Event_Error),
    MAXDIFF_ENTRY(PJRT_Event_Await),
    MAXDIFF_ENTRY(PJRT_Event_OnReady),
    MAXDIFF_ENTRY(PJRT_Client_Create),
    MAXDIFF_ENTRY(PJRT_Client_Destroy),
    MAXDIFF_ENTRY(PJRT_Client_PlatformName),
    MAXDIFF_ENTRY(PJRT_Client_ProcessIndex),
    MAXDIFF_ENTRY(PJRT_Client_PlatformVersion),
    MAXDIFF_ENTRY(PJRT_Client_Devices),
    MAXDIFF_ENTRY(PJRT_Client_AddressableDevices),
    MAXDIFF_ENTRY(PJRT_Client_LookupDevice),
    MAXDIFF_ENTRY(PJRT_Client_LookupAddressableDevice),
    MAXDIFF_ENTRY(PJRT_Client_AddressableMemories),
    MAXDIFF_ENTRY(PJRT_Client_Compile),
    MAXDIFF_ENTRY(PJRT_Client_DefaultDeviceAssignment),
    MAXDIFF_ENTRY(PJRT_Client_BufferFromHostBuffer),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_Id),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_ProcessIndex),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_Attributes),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_Kind),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_DebugString),
    MAXDIFF_ENTRY(PJRT_DeviceDescription_ToString),
    MAXDIFF_ENTRY(PJRT_Device_GetDescription),
    MAXDIFF_ENTRY(PJRT_Device_IsAddressable),
    MAXDIFF_ENTRY(PJRT_Device_LocalHardwareId),
    MAXDIFF_ENTRY(PJRT_Device_AddressableMemories),
    MAXDIFF_ENTRY(PJRT_Device_DefaultMemory),
    MAXDIFF_ENTRY(PJRT_Device_MemoryStats),
    MAXDIFF_ENTRY(PJRT_Memory_Id),
    MAXDIFF_ENTRY(PJRT_Memory_Kind),
    MAXDIFF_ENTRY(PJRT_Memory_DebugString),
    MAXDIFF_ENTRY(PJRT_Memory_ToString),
    MAXDIFF_ENTRY(PJRT_Memory_AddressableByDevices),
    MAXDIFF_ENTRY(PJRT_Executable_Destroy),
    MAXDIFF_ENTRY(PJRT_Executable_Name),
    MAXDIFF_ENTRY(PJRT_Executable_NumReplicas),
    MAXDIFF_ENTRY(PJRT_Executable_NumPartitions),
    MAXDIFF_ENTRY(PJRT_Executable_NumOutputs),
    MAXDIFF_ENTRY(PJRT_Executable_SizeOfGeneratedCodeInBytes),
    MAXDIFF_ENTRY(PJRT_Executable_GetCostAnalysis),
    MAXDIFF_ENTRY(PJRT_Executable_OutputMemoryKinds),
    MAXDIFF_ENTRY(PJRT_Executable_OptimizedProgram),
    MAXDIFF_ENTRY(PJRT_Executable_Serialize),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_Destroy),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_GetExecutable),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_AddressableDevices),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_Delete),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_IsDeleted),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_Execute),
    MAXDIFF_ENTRY(PJRT_Executable_DeserializeAndLoad),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_Fingerprint),
    MAXDIFF_ENTRY(PJRT_Buffer_Destroy),
    MAXDIFF_ENTRY(PJRT_Buffer_ElementType),
    MAXDIFF_ENTRY(PJRT_Buffer_Dimensions),
    MAXDIFF_ENTRY(PJRT_Buffer_UnpaddedDimensions),
    MAXDIFF_ENTRY(PJRT_Buffer_DynamicDimensionIndices),
    MAXDIFF_ENTRY(PJRT_Buffer_GetMemoryLayout),
    MAXDIFF_ENTRY(PJRT_Buffer_OnDeviceSizeInBytes),
    MAXDIFF_ENTRY(PJRT_Buffer_Device),
    MAXDIFF_ENTRY(PJRT_Buffer_Memory),
    MAXDIFF_ENTRY(PJRT_Buffer_Delete),
    MAXDIFF_ENTRY(PJRT_Buffer_IsDeleted),
    MAXDIFF_ENTRY(PJRT_Buffer_CopyToDevice),
    MAXDIFF_ENTRY(PJRT_Buffer_ToHostBuffer),
    MAXDIFF_ENTRY(PJRT_Buffer_IsOnCpu),
    MAXDIFF_ENTRY(PJRT_Buffer_ReadyEvent),
    MAXDIFF_ENTRY(PJRT_Buffer_UnsafePointer),
    MAXDIFF_ENTRY(PJRT_Buffer_IncreaseExternalReferenceCount),
    MAXDIFF_ENTRY(PJRT_Buffer_DecreaseExternalReferenceCount),
    MAXDIFF_ENTRY(PJRT_Buffer_OpaqueDeviceMemoryDataPointer),
    MAXDIFF_ENTRY(PJRT_CopyToDeviceStream_Destroy),
    MAXDIFF_ENTRY(PJRT_CopyToDeviceStream_AddChunk),
    MAXDIFF_ENTRY(PJRT_CopyToDeviceStream_TotalBytes),
    MAXDIFF_ENTRY(PJRT_CopyToDeviceStream_GranuleSize),
    MAXDIFF_ENTRY(PJRT_CopyToDeviceStream_CurrentBytes),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_Create),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_Destroy),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_PlatformName),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_PlatformVersion),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_GetDeviceDescriptions),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_Serialize),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_Attributes),
    MAXDIFF_ENTRY(PJRT_Compile),
    MAXDIFF_ENTRY(PJRT_Executable_OutputElementTypes),
    MAXDIFF_ENTRY(PJRT_Executable_OutputDimensions),
    MAXDIFF_ENTRY(PJRT_Buffer_CopyToMemory),
    MAXDIFF_ENTRY(PJRT_Client_CreateViewOfDeviceBuffer),
    MAXDIFF_ENTRY(PJRT_Executable_Fingerprint),
    MAXDIFF_ENTRY(PJRT_Client_TopologyDescription),
    MAXDIFF_ENTRY(PJRT_Executable_GetCompiledMemoryStats),
    MAXDIFF_ENTRY(PJRT_Memory_Kind_Id),
    MAXDIFF_ENTRY(PJRT_ExecuteContext_Create),
    MAXDIFF_ENTRY(PJRT_ExecuteContext_Destroy),
    MAXDIFF_ENTRY(PJRT_Buffer_CopyRawToHost),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_Destroy),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_TransferData),
    MAXDIFF_ENTRY(PJRT_Client_CreateBuffersForAsyncHostToDevice),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_Device),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_BufferCount),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_BufferSize),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_SetBufferError),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_AddMetadata),
    MAXDIFF_ENTRY(PJRT_Client_DmaMap),
    MAXDIFF_ENTRY(PJRT_Client_DmaUnmap),
    MAXDIFF_ENTRY(PJRT_Client_CreateUninitializedBuffer),
    MAXDIFF_ENTRY(PJRT_Client_UpdateGlobalProcessInfo),
    MAXDIFF_ENTRY(PJRT_TopologyDescription_Deserialize),
    MAXDIFF_ENTRY(PJRT_Client_CreateAliasBuffer),
    MAXDIFF_ENTRY(PJRT_Client_FulfillAliasBuffer),
    MAXDIFF_ENTRY(PJRT_LoadedExecutable_GetDeviceAssignment),
    MAXDIFF_ENTRY(PJRT_Client_CreateErrorBuffer),
    MAXDIFF_ENTRY(PJRT_AsyncHostToDeviceTransferManager_TransferLiteral),
    MAXDIFF_ENTRY(PJRT_Buffer_CopyRawToHostFuture),
    MAXDIFF_ENTRY(PJRT_Device_PoisonExecution),
    MAXDIFF_ENTRY(PJRT_Device_CreateAsyncTrackingEvent),
    MAXDIFF_ENTRY(PJRT_AsyncTrackingEvent_Destroy),
    MAXDIFF_ENTRY(PJRT_Executable_GetCompileOptions),
    MAXDIFF_ENTRY(PJRT_Buffer_DonateWithControlDependency),
    MAXDIFF_ENTRY(PJRT_Event_Create),
    MAXDIFF_ENTRY(PJRT_Event_Set),
};
// clang-format on

}  // namespace maxdiff

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() {
  return &maxdiff::kApi;
}

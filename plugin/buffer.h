// PJRT_Buffer_* and PJRT_Client_BufferFromHostBuffer.
#ifndef MAXDIFF_PLUGIN_BUFFER_H_
#define MAXDIFF_PLUGIN_BUFFER_H_

#include "objects.h"
#include "xla/literal.h"
#include "xla/shape_util.h"

namespace maxdiff {

inline absl::Status CheckLive(const PJRT_Buffer* buffer) {
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(buffer, "buffer"));
  if (buffer->buffer->IsDeleted()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the buffer of shape ", buffer->buffer->on_device_shape().ToString(),
        " has been deleted or donated"));
  }
  return absl::OkStatus();
}

inline absl::StatusOr<xla::PjRtMemorySpace*> TargetMemory(PJRT_Device* device,
                                                          PJRT_Memory* memory) {
  if (memory != nullptr) return memory->memory;
  MAXDIFF_RETURN_IF_ERROR(CheckNotNull(device, "device"));
  return device->device->default_memory_space();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_BufferFromHostBuffer) {
  MAXDIFF_CHECK_ARG(client);
  MAXDIFF_ASSIGN_OR_RETURN(xla::PrimitiveType type, ToXlaType(args->type));
  MAXDIFF_ASSIGN_OR_RETURN(absl::Span<const int64_t> dims,
                           CheckDimensions(args->dims, args->num_dims));
  bool empty = false;
  for (int64_t dim : dims) empty |= dim == 0;
  if (!empty) MAXDIFF_CHECK_ARG(data);
  if (args->num_byte_strides != 0) {
    MAXDIFF_CHECK_ARG(byte_strides);
    if (args->num_byte_strides != args->num_dims) {
      return absl::InvalidArgumentError(absl::StrCat("num_byte_strides is ",
                                                     args->num_byte_strides, ", num_dims is ",
                                                     args->num_dims));
    }
    if (!IsDenseRowMajor(dims, {args->byte_strides, args->num_byte_strides}, type)) {
      return absl::UnimplementedError(
          "the CPU plugin takes dense row-major host arrays only; these byte_strides are not");
    }
  }
  MAXDIFF_ASSIGN_OR_RETURN(xla::Layout layout, ToXlaLayout(args->device_layout, dims.size()));
  MAXDIFF_ASSIGN_OR_RETURN(xla::PjRtMemorySpace * memory,
                           TargetMemory(args->device, args->memory));

  using Semantics = xla::PjRtClient::HostBufferSemantics;
  Semantics semantics;
  switch (args->host_buffer_semantics) {
    case PJRT_HostBufferSemantics_kImmutableOnlyDuringCall:
      semantics = Semantics::kImmutableOnlyDuringCall;
      break;
    case PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes:
      semantics = Semantics::kImmutableUntilTransferCompletes;
      break;
    case PJRT_HostBufferSemantics_kImmutableZeroCopy:
      semantics = Semantics::kImmutableZeroCopy;
      break;
    case PJRT_HostBufferSemantics_kMutableZeroCopy:
      semantics = Semantics::kMutableZeroCopy;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("host_buffer_semantics ", static_cast<int>(args->host_buffer_semantics),
                       " is unknown"));
  }

  auto [promise, done] = xla::MakePromise<>();
  MAXDIFF_ASSIGN_OR_RETURN(
      std::unique_ptr<xla::PjRtBuffer> buffer,
      args->client->client->BufferFromHostBuffer(
          args->data, type, dims, /*byte_strides=*/std::nullopt, semantics,
          [promise = std::move(promise)]() mutable { promise.Set(); }, memory,
          args->device_layout == nullptr ? nullptr : &layout));
  args->buffer = NewBuffer(args->client, std::move(buffer));
  args->done_with_host_buffer = NewEvent(std::move(done));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_CreateUninitializedBuffer) {
  MAXDIFF_CHECK_ARG(client);
  MAXDIFF_ASSIGN_OR_RETURN(xla::PrimitiveType type, ToXlaType(args->shape_element_type));
  MAXDIFF_ASSIGN_OR_RETURN(absl::Span<const int64_t> dims,
                           CheckDimensions(args->shape_dims, args->shape_num_dims));
  MAXDIFF_ASSIGN_OR_RETURN(xla::Layout layout, ToXlaLayout(args->shape_layout, dims.size()));
  MAXDIFF_ASSIGN_OR_RETURN(xla::PjRtMemorySpace * memory,
                           TargetMemory(args->device, args->memory));
  xla::Shape shape = xla::ShapeUtil::MakeShapeWithDenseLayout(type, dims, layout.minor_to_major());
  MAXDIFF_ASSIGN_OR_RETURN(std::unique_ptr<xla::PjRtBuffer> buffer,
                           args->client->client->CreateUninitializedBuffer(shape, memory));
  args->buffer = NewBuffer(args->client, std::move(buffer));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_Destroy) {
  delete args->buffer;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_ElementType) {
  MAXDIFF_CHECK_ARG(buffer);
  args->type = ToCType(args->buffer->buffer->element_type());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_Dimensions) {
  MAXDIFF_CHECK_ARG(buffer);
  absl::Span<const int64_t> dims = args->buffer->buffer->dimensions();
  args->dims = dims.data();
  args->num_dims = dims.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_UnpaddedDimensions) {
  MAXDIFF_CHECK_ARG(buffer);
  std::lock_guard<std::mutex> lock(args->buffer->mutex);
  if (!args->buffer->unpadded_dims.has_value()) {
    xla::PjRtBuffer* buffer = args->buffer->buffer.get();
    if (buffer->has_dynamic_dimensions()) {
      MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
      MAXDIFF_ASSIGN_OR_RETURN(args->buffer->unpadded_dims, buffer->logical_dimensions());
    } else {
      absl::Span<const int64_t> dims = buffer->dimensions();
      args->buffer->unpadded_dims.emplace(dims.begin(), dims.end());
    }
  }
  args->unpadded_dims = args->buffer->unpadded_dims->data();
  args->num_dims = args->buffer->unpadded_dims->size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_GetMemoryLayout) {
  MAXDIFF_CHECK_ARG(buffer);
  std::lock_guard<std::mutex> lock(args->buffer->mutex);
  const xla::Shape& shape = args->buffer->buffer->on_device_shape();
  if (!shape.IsArray() || !shape.has_layout()) {
    return absl::InvalidArgumentError("the buffer is not an array with a layout");
  }
  absl::Span<const int64_t> order = shape.layout().minor_to_major();
  args->buffer->minor_to_major.assign(order.begin(), order.end());
  args->layout = {};
  args->layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  args->layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  args->layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  args->layout.tiled.minor_to_major = args->buffer->minor_to_major.data();
  args->layout.tiled.minor_to_major_size = args->buffer->minor_to_major.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_OnDeviceSizeInBytes) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_ASSIGN_OR_RETURN(args->on_device_size_in_bytes,
                           args->buffer->buffer->GetOnDeviceSizeInBytes());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_Device) {
  MAXDIFF_CHECK_ARG(buffer);
  args->device = args->buffer->client->device_of.at(args->buffer->buffer->device());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_Memory) {
  MAXDIFF_CHECK_ARG(buffer);
  args->memory = args->buffer->client->memory_of.at(args->buffer->buffer->memory_space());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_Delete) {
  MAXDIFF_CHECK_ARG(buffer);
  args->buffer->buffer->Delete();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_IsDeleted) {
  MAXDIFF_CHECK_ARG(buffer);
  args->is_deleted = args->buffer->buffer->IsDeleted();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_CopyToDevice) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_CHECK_ARG(dst_device);
  MAXDIFF_ASSIGN_OR_RETURN(xla::PjRtMemorySpace * memory,
                           args->dst_device->device->default_memory_space());
  MAXDIFF_ASSIGN_OR_RETURN(std::unique_ptr<xla::PjRtBuffer> copy,
                           args->buffer->buffer->CopyToMemorySpace(memory));
  args->dst_buffer = NewBuffer(args->dst_device->client, std::move(copy));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_CopyToMemory) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_CHECK_ARG(dst_memory);
  MAXDIFF_ASSIGN_OR_RETURN(std::unique_ptr<xla::PjRtBuffer> copy,
                           args->buffer->buffer->CopyToMemorySpace(args->dst_memory->memory));
  args->dst_buffer = NewBuffer(args->dst_memory->client, std::move(copy));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_ToHostBuffer) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->src));
  xla::PjRtBuffer* source = args->src->buffer.get();
  const xla::Shape& device_shape = source->on_device_shape();
  if (!device_shape.IsArray() || device_shape.is_dynamic()) {
    return absl::UnimplementedError(absl::StrCat("reading a buffer of shape ",
                                                 device_shape.ToString(),
                                                 ": only static arrays can be read"));
  }
  // Without a host layout the C API keeps the device's.
  xla::Layout layout = device_shape.layout();
  if (args->host_layout != nullptr) {
    MAXDIFF_ASSIGN_OR_RETURN(layout,
                             ToXlaLayout(args->host_layout, device_shape.dimensions().size()));
  }
  const xla::Shape host_shape = xla::ShapeUtil::MakeShapeWithDenseLayout(
      device_shape.element_type(), device_shape.dimensions(), layout.minor_to_major());
  const size_t needed = xla::ShapeUtil::ByteSizeOfElements(host_shape);
  if (args->dst == nullptr) {
    args->dst_size = needed;
    return absl::OkStatus();
  }
  if (args->dst_size < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("dst_size is ", args->dst_size, " bytes, the buffer needs ", needed));
  }
  auto literal =
      std::make_shared<xla::MutableBorrowingLiteral>(static_cast<char*>(args->dst), host_shape);
  xla::Future<> future = source->ToLiteral(literal.get());
  // The literal's shape is read until the copy ends.
  future.OnReady([literal](const absl::Status&) {});
  args->event = NewEvent(std::move(future));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_CopyRawToHost) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_ASSIGN_OR_RETURN(size_t size, args->buffer->buffer->GetOnDeviceSizeInBytes());
  if (args->offset < 0 || args->transfer_size < 0 ||
      static_cast<size_t>(args->offset) > size ||
      static_cast<size_t>(args->transfer_size) > size - static_cast<size_t>(args->offset)) {
    return absl::OutOfRangeError(absl::StrCat("bytes ", args->offset, " to ", args->offset, " + ",
                                              args->transfer_size, " of a buffer of ", size));
  }
  if (args->transfer_size > 0) MAXDIFF_CHECK_ARG(dst);
  args->event =
      NewEvent(args->buffer->buffer->CopyRawToHost(args->dst, args->offset, args->transfer_size));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_IsOnCpu) {
  MAXDIFF_CHECK_ARG(buffer);
  args->is_on_cpu = args->buffer->buffer->IsOnCpu();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_ReadyEvent) {
  MAXDIFF_CHECK_ARG(buffer);
  args->event = NewEvent(args->buffer->buffer->GetReadyFuture());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_UnsafePointer) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_ASSIGN_OR_RETURN(
      args->buffer_pointer,
      args->buffer->client->client->UnsafeBufferPointer(args->buffer->buffer.get()));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_IncreaseExternalReferenceCount) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_ASSIGN_OR_RETURN(auto reference, args->buffer->buffer->AcquireExternalReference());
  std::lock_guard<std::mutex> lock(args->buffer->mutex);
  args->buffer->external_references.push_back(std::move(reference));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_DecreaseExternalReferenceCount) {
  MAXDIFF_CHECK_ARG(buffer);
  std::lock_guard<std::mutex> lock(args->buffer->mutex);
  if (args->buffer->external_references.empty()) {
    return absl::FailedPreconditionError("the buffer has no external reference to give back");
  }
  args->buffer->external_references.pop_back();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Buffer_OpaqueDeviceMemoryDataPointer) {
  MAXDIFF_RETURN_IF_ERROR(CheckLive(args->buffer));
  MAXDIFF_ASSIGN_OR_RETURN(auto reference, args->buffer->buffer->AcquireExternalReference());
  args->device_memory_ptr = reference->OpaqueDeviceMemoryDataPointer();
  return absl::OkStatus();
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_BUFFER_H_

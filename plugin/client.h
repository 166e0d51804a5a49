// PJRT_Client_* but for compilation and buffers, and the devices, memories and topology it owns.
#ifndef MAXDIFF_PLUGIN_CLIENT_H_
#define MAXDIFF_PLUGIN_CLIENT_H_

#include <algorithm>
#include <thread>

#include "memory.h"
#include "objects.h"
#include "threads.h"
#include "xla/pjrt/plugin/xla_cpu/xla_cpu_pjrt_client.h"

namespace maxdiff {

// More virtual devices than this is taken for a mistake: each costs threads.
inline constexpr int64_t kMaxDevices = 4096;

// Reads the integer option `value`.
inline absl::StatusOr<int64_t> IntegerOption(const PJRT_NamedValue& value) {
  if (value.type == PJRT_NamedValue_kInt64) return value.int64_value;
  return absl::InvalidArgumentError(
      absl::StrCat("client option ", absl::string_view(value.name, value.name_size), " must be an int64"));
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_Create) {
  xla::CpuClientOptions options;
  options.cpu_device_count = 1;
  int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, kMaxThreads);
  if (args->num_options > 0) MAXDIFF_CHECK_ARG(create_options);
  for (const PJRT_NamedValue& value : absl::MakeConstSpan(args->create_options, args->num_options)) {
    const absl::string_view name(value.name, value.name_size);
    if (name == "cpu_device_count") {
      MAXDIFF_ASSIGN_OR_RETURN(const int64_t count, IntegerOption(value));
      if (count < 1 || count > kMaxDevices) {
        return absl::InvalidArgumentError(
            absl::StrCat("client option cpu_device_count is ", count, ", expected 1 to ", kMaxDevices));
      }
      options.cpu_device_count = static_cast<int>(count);
    } else if (name == "cpu_threads") {
      MAXDIFF_ASSIGN_OR_RETURN(threads, IntegerOption(value));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "unknown client option '", name, "'; the CPU plugin knows cpu_device_count and cpu_threads"));
    }
  }
  MAXDIFF_RETURN_IF_ERROR(UseThreads(threads));
  auto memory = std::make_shared<MemoryPool>();
  options.allocator = [memory](size_t size, size_t alignment) {
    return memory->Allocate(size, alignment);
  };
  MAXDIFF_ASSIGN_OR_RETURN(std::unique_ptr<xla::PjRtClient> client,
                           xla::GetXlaPjrtCpuClient(std::move(options)));
  args->client = new PJRT_Client(std::move(client), std::move(memory));
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_Destroy) {
  delete args->client;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_PlatformName) {
  MAXDIFF_CHECK_ARG(client);
  absl::string_view name = args->client->client->platform_name();
  args->platform_name = name.data();
  args->platform_name_size = name.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_PlatformVersion) {
  MAXDIFF_CHECK_ARG(client);
  absl::string_view version = args->client->client->platform_version();
  args->platform_version = version.data();
  args->platform_version_size = version.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_ProcessIndex) {
  MAXDIFF_CHECK_ARG(client);
  args->process_index = args->client->client->process_index();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_Devices) {
  MAXDIFF_CHECK_ARG(client);
  args->devices = args->client->devices.data();
  args->num_devices = args->client->devices.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_AddressableDevices) {
  MAXDIFF_CHECK_ARG(client);
  args->addressable_devices = args->client->addressable_devices.data();
  args->num_addressable_devices = args->client->addressable_devices.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_LookupDevice) {
  MAXDIFF_CHECK_ARG(client);
  for (PJRT_Device* device : args->client->devices) {
    if (device->device->global_device_id().value() == args->id) {
      args->device = device;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("no device with id ", args->id));
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_LookupAddressableDevice) {
  MAXDIFF_CHECK_ARG(client);
  for (PJRT_Device* device : args->client->addressable_devices) {
    if (device->device->local_hardware_id().value() == args->local_hardware_id) {
      args->addressable_device = device;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no addressable device with local hardware id ", args->local_hardware_id));
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_AddressableMemories) {
  MAXDIFF_CHECK_ARG(client);
  args->addressable_memories = args->client->memories.data();
  args->num_addressable_memories = args->client->memories.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_DefaultDeviceAssignment) {
  MAXDIFF_CHECK_ARG(client);
  MAXDIFF_CHECK_ARG(default_assignment);
  if (args->num_replicas < 1 || args->num_partitions < 1) {
    return absl::InvalidArgumentError("num_replicas and num_partitions must be positive");
  }
  const size_t needed = static_cast<size_t>(args->num_replicas) * args->num_partitions;
  if (args->default_assignment_size < needed) {
    return absl::InvalidArgumentError(absl::StrCat("default_assignment_size is ",
                                                   args->default_assignment_size, ", needed ",
                                                   needed));
  }
  MAXDIFF_ASSIGN_OR_RETURN(
      xla::DeviceAssignment assignment,
      args->client->client->GetDefaultDeviceAssignment(args->num_replicas, args->num_partitions));
  size_t next = 0;
  for (int replica = 0; replica < args->num_replicas; ++replica) {
    for (int partition = 0; partition < args->num_partitions; ++partition) {
      args->default_assignment[next++] = static_cast<int>(assignment(replica, partition));
    }
  }
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Client_TopologyDescription) {
  MAXDIFF_CHECK_ARG(client);
  PJRT_Client* client = args->client;
  MAXDIFF_ASSIGN_OR_RETURN(const xla::PjRtTopologyDescription* topology,
                           client->client->GetTopologyDescription());
  std::call_once(client->topology_once, [&] {
    client->topology = std::make_unique<PJRT_TopologyDescription>(topology);
  });
  args->topology = client->topology.get();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_Destroy) {
  if (args->topology == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("the CPU topology belongs to its client");
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_PlatformName) {
  MAXDIFF_CHECK_ARG(topology);
  absl::string_view name = args->topology->topology->platform_name();
  args->platform_name = name.data();
  args->platform_name_size = name.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_PlatformVersion) {
  MAXDIFF_CHECK_ARG(topology);
  absl::string_view version = args->topology->topology->platform_version();
  args->platform_version = version.data();
  args->platform_version_size = version.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_GetDeviceDescriptions) {
  MAXDIFF_CHECK_ARG(topology);
  args->descriptions = args->topology->description_pointers.data();
  args->num_descriptions = args->topology->description_pointers.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_Attributes) {
  MAXDIFF_CHECK_ARG(topology);
  args->attributes = args->topology->attributes.data();
  args->num_attributes = args->topology->attributes.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_TopologyDescription_Serialize) {
  MAXDIFF_CHECK_ARG(topology);
  MAXDIFF_ASSIGN_OR_RETURN(std::string bytes, args->topology->topology->Serialize());
  auto* holder = new PJRT_SerializedTopology{std::move(bytes)};
  args->serialized_bytes = holder->bytes.data();
  args->serialized_bytes_size = holder->bytes.size();
  args->serialized_topology = holder;
  args->serialized_topology_deleter = [](PJRT_SerializedTopology* topology) { delete topology; };
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_Id) {
  MAXDIFF_CHECK_ARG(device_description);
  args->id = args->device_description->description->id();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_ProcessIndex) {
  MAXDIFF_CHECK_ARG(device_description);
  args->process_index = args->device_description->description->process_index();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_Attributes) {
  MAXDIFF_CHECK_ARG(device_description);
  args->attributes = args->device_description->attributes.data();
  args->num_attributes = args->device_description->attributes.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_Kind) {
  MAXDIFF_CHECK_ARG(device_description);
  args->device_kind = args->device_description->kind.data();
  args->device_kind_size = args->device_description->kind.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_DebugString) {
  MAXDIFF_CHECK_ARG(device_description);
  args->debug_string = args->device_description->debug_string.data();
  args->debug_string_size = args->device_description->debug_string.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_DeviceDescription_ToString) {
  MAXDIFF_CHECK_ARG(device_description);
  args->to_string = args->device_description->to_string.data();
  args->to_string_size = args->device_description->to_string.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Device_GetDescription) {
  MAXDIFF_CHECK_ARG(device);
  args->device_description = &args->device->description;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Device_IsAddressable) {
  MAXDIFF_CHECK_ARG(device);
  args->is_addressable = args->device->device->IsAddressable();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Device_LocalHardwareId) {
  MAXDIFF_CHECK_ARG(device);
  args->local_hardware_id = args->device->device->local_hardware_id().value();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Device_AddressableMemories) {
  MAXDIFF_CHECK_ARG(device);
  args->memories = args->device->memories.data();
  args->num_memories = args->device->memories.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Device_DefaultMemory) {
  MAXDIFF_CHECK_ARG(device);
  MAXDIFF_ASSIGN_OR_RETURN(xla::PjRtMemorySpace * memory,
                           args->device->device->default_memory_space());
  args->memory = args->device->client->memory_of.at(memory);
  return absl::OkStatus();
}

// All virtual devices draw on the one memory of the host, so its figures are a device's own only
// when there is one device.
MAXDIFF_PJRT_FUNCTION(PJRT_Device_MemoryStats) {
  MAXDIFF_CHECK_ARG(device);
  const PJRT_Client* client = args->device->client;
  if (client->devices.size() != 1) {
    return absl::UnimplementedError(absl::StrCat("memory is not counted by device when ",
                                                 client->devices.size(), " devices share the host"));
  }
  const MemoryPool::Stats stats = client->memory->stats();
  args->bytes_in_use = stats.bytes_in_use;
  args->peak_bytes_in_use = stats.peak_bytes_in_use;
  args->peak_bytes_in_use_is_set = true;
  args->num_allocs = stats.num_allocs;
  args->num_allocs_is_set = true;
  args->largest_alloc_size = stats.largest_alloc_size;
  args->largest_alloc_size_is_set = true;
  args->bytes_limit_is_set = false;
  args->bytes_reserved_is_set = false;
  args->peak_bytes_reserved_is_set = false;
  args->bytes_reservable_limit_is_set = false;
  args->largest_free_block_bytes_is_set = false;
  args->pool_bytes = stats.bytes_in_use + stats.cached_bytes;
  args->pool_bytes_is_set = true;
  args->peak_pool_bytes_is_set = false;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_Id) {
  MAXDIFF_CHECK_ARG(memory);
  args->id = args->memory->memory->id();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_Kind) {
  MAXDIFF_CHECK_ARG(memory);
  absl::string_view kind = args->memory->memory->kind();
  args->kind = kind.data();
  args->kind_size = kind.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_Kind_Id) {
  MAXDIFF_CHECK_ARG(memory);
  args->kind_id = args->memory->memory->kind_id();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_DebugString) {
  MAXDIFF_CHECK_ARG(memory);
  absl::string_view text = args->memory->memory->DebugString();
  args->debug_string = text.data();
  args->debug_string_size = text.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_ToString) {
  MAXDIFF_CHECK_ARG(memory);
  absl::string_view text = args->memory->memory->ToString();
  args->to_string = text.data();
  args->to_string_size = text.size();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Memory_AddressableByDevices) {
  MAXDIFF_CHECK_ARG(memory);
  args->devices = args->memory->devices.data();
  args->num_devices = args->memory->devices.size();
  return absl::OkStatus();
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_CLIENT_H_

//! The C structs of `xla/pjrt/c/pjrt_c_api.h`, version 0.90, that this program uses.
//!
//! Names and field order are the header's. The compiler that builds the CPU plugin checks these
//! declarations against it: see `layout.rs`.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// One function of the plugin's table.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub name: &'static str,
    /// Position among the function pointers of `PJRT_Api`.
    pub index: usize,
}

/// The argument struct of one function.
///
/// # Safety
/// The type is `repr(C)`, starts with `struct_size` and `extension_start`, is valid when all its
/// bytes are zero, and is what the function named by `FUNCTION` takes.
pub unsafe trait Args: Sized {
    const FUNCTION: Function;
}

/// Where a struct has its fields, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct StructLayout {
    pub name: &'static str,
    /// Up to the end of the last field.
    pub struct_size: usize,
    /// With padding after the last field.
    pub size: usize,
    /// The fields after `struct_size` and `extension_start`, and where they are.
    pub fields: &'static [(&'static str, usize)],
}

/// A struct that travels inside argument structs, and says its own size too.
macro_rules! plain {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => { $(
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name {
            pub struct_size: usize,
            pub extension_start: *mut c_void,
            $(pub $field: $type,)*
        }

        impl $name {
            /// Bytes up to the end of the last field, without padding, as in the header.
            pub const STRUCT_SIZE: usize = {
                let end = 2 * size_of::<usize>();
                // C fields lie in the order they are declared: the last one is what stays.
                $(let _ = end; let end = offset_of!($name, $field) + size_of::<$type>();)*
                end
            };

            pub const LAYOUT: StructLayout = StructLayout {
                name: stringify!($name),
                struct_size: Self::STRUCT_SIZE,
                size: size_of::<$name>(),
                fields: &[$((stringify!($field), offset_of!($name, $field))),*],
            };

            /// All zero but for `struct_size`.
            pub fn new() -> Self {
                // SAFETY: every field is an integer, a bool, a raw pointer, an optional function
                // pointer, or a struct of these: all zero is a value of each.
                let mut value: Self = unsafe { std::mem::zeroed() };
                value.struct_size = Self::STRUCT_SIZE;
                value
            }
        }
    )* };
}

macro_rules! functions {
    ($($function:ident = $index:literal => $args:ident
       { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            plain! { $args { $($field: $type),* } }

            // SAFETY: `plain!` makes the struct `repr(C)` with the common head and zeroable
            // fields; that it is the function's is checked against the header in `layout.rs`.
            unsafe impl Args for $args {
                const FUNCTION: Function = Function {
                    name: stringify!($function),
                    index: $index,
                };
            }
        )*

        /// Every function used, and its argument struct.
        pub const FUNCTIONS: &[(Function, StructLayout)] = &[$(($args::FUNCTION, $args::LAYOUT)),*];
    };
}

/// Objects of the plugin, known by pointer only.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub struct $name { _opaque: [u8; 0] }
    )* };
}

opaque! {
    PJRT_Error PJRT_Event PJRT_Client PJRT_Device PJRT_Memory PJRT_DeviceDescription
    PJRT_TopologyDescription PJRT_Executable PJRT_LoadedExecutable PJRT_Buffer
    PJRT_SerializedExecutable PJRT_ExecuteContext
}

/// The head of `PJRT_Api`; the function pointers follow it.
#[repr(C)]
pub struct PJRT_Api_Head {
    pub struct_size: usize,
    pub extension_start: *mut c_void,
    pub version_struct_size: usize,
    pub version_extension_start: *mut c_void,
    pub major_version: i32,
    pub minor_version: i32,
}

pub const NAMED_VALUE_STRING: i32 = 0;
pub const NAMED_VALUE_INT64: i32 = 1;
pub const NAMED_VALUE_INT64_LIST: i32 = 2;
pub const NAMED_VALUE_FLOAT: i32 = 3;
pub const NAMED_VALUE_BOOL: i32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub union PJRT_NamedValue_Value {
    pub string_value: *const c_char,
    pub int64_value: i64,
    pub int64_array_value: *const i64,
    pub float_value: f32,
    pub bool_value: bool,
}

pub const HOST_BUFFER_IMMUTABLE_ONLY_DURING_CALL: i32 = 0;
pub const HOST_BUFFER_IMMUTABLE_UNTIL_TRANSFER_COMPLETES: i32 = 1;

pub const MEMORY_LAYOUT_TILED: i32 = 0;

/// `PJRT_Buffer_MemoryLayout` with its union fixed to the tiled kind, the larger of the two.
#[repr(C)]
pub struct PJRT_Buffer_MemoryLayout {
    pub struct_size: usize,
    pub extension_start: *mut c_void,
    pub tiled: PJRT_Buffer_MemoryLayout_Tiled,
    pub r#type: i32,
}

impl PJRT_Buffer_MemoryLayout {
    pub const STRUCT_SIZE: usize = offset_of!(Self, r#type) + size_of::<i32>();

    const LAYOUT: StructLayout = StructLayout {
        name: "PJRT_Buffer_MemoryLayout",
        struct_size: Self::STRUCT_SIZE,
        size: size_of::<Self>(),
        fields: &[
            ("tiled", offset_of!(Self, tiled)),
            ("r#type", offset_of!(Self, r#type)),
        ],
    };
}

/// The structs that argument structs point to.
pub const SHARED: &[StructLayout] = &[
    PJRT_NamedValue::LAYOUT,
    PJRT_Program::LAYOUT,
    PJRT_Buffer_MemoryLayout_Tiled::LAYOUT,
    PJRT_Buffer_MemoryLayout::LAYOUT,
    PJRT_ExecuteOptions::LAYOUT,
];

pub type OnReadyCallback = unsafe extern "C" fn(error: *mut PJRT_Error, user_arg: *mut c_void);

plain! {
    PJRT_NamedValue {
        name: *const c_char,
        name_size: usize,
        r#type: i32,
        value: PJRT_NamedValue_Value,
        value_size: usize,
    }
    PJRT_Program {
        code: *mut c_char,
        code_size: usize,
        format: *const c_char,
        format_size: usize,
    }
    PJRT_Buffer_MemoryLayout_Tiled {
        minor_to_major: *const i64,
        minor_to_major_size: usize,
        tile_dims: *const i64,
        tile_dim_sizes: *const usize,
        num_tiles: usize,
    }
    PJRT_ExecuteOptions {
        send_callbacks: *mut c_void,
        recv_callbacks: *mut c_void,
        num_send_ops: usize,
        num_recv_ops: usize,
        launch_id: i32,
        non_donatable_input_indices: *const i64,
        num_non_donatable_input_indices: usize,
        context: *mut PJRT_ExecuteContext,
        call_location: *const c_char,
        num_tasks: usize,
        task_ids: *mut i32,
        incarnation_ids: *mut i64,
    }
}

functions! {
    PJRT_Error_Destroy = 0 => PJRT_Error_Destroy_Args { error: *mut PJRT_Error }
    PJRT_Error_Message = 1 => PJRT_Error_Message_Args {
        error: *const PJRT_Error,
        message: *const c_char,
        message_size: usize,
    }
    PJRT_Error_GetCode = 2 => PJRT_Error_GetCode_Args { error: *const PJRT_Error, code: i32 }

    PJRT_Plugin_Initialize = 3 => PJRT_Plugin_Initialize_Args {}
    PJRT_Plugin_Attributes = 4 => PJRT_Plugin_Attributes_Args {
        attributes: *const PJRT_NamedValue,
        num_attributes: usize,
    }

    PJRT_Event_Destroy = 5 => PJRT_Event_Destroy_Args { event: *mut PJRT_Event }
    PJRT_Event_IsReady = 6 => PJRT_Event_IsReady_Args { event: *mut PJRT_Event, is_ready: bool }
    PJRT_Event_Await = 8 => PJRT_Event_Await_Args { event: *mut PJRT_Event }
    PJRT_Event_OnReady = 9 => PJRT_Event_OnReady_Args {
        event: *mut PJRT_Event,
        callback: Option<OnReadyCallback>,
        user_arg: *mut c_void,
    }

    PJRT_Client_Create = 10 => PJRT_Client_Create_Args {
        create_options: *const PJRT_NamedValue,
        num_options: usize,
        kv_get_callback: *mut c_void,
        kv_get_user_arg: *mut c_void,
        kv_put_callback: *mut c_void,
        kv_put_user_arg: *mut c_void,
        client: *mut PJRT_Client,
        kv_try_get_callback: *mut c_void,
        kv_try_get_user_arg: *mut c_void,
    }
    PJRT_Client_Destroy = 11 => PJRT_Client_Destroy_Args { client: *mut PJRT_Client }
    PJRT_Client_PlatformName = 12 => PJRT_Client_PlatformName_Args {
        client: *mut PJRT_Client,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    PJRT_Client_ProcessIndex = 13 => PJRT_Client_ProcessIndex_Args {
        client: *mut PJRT_Client,
        process_index: i32,
    }
    PJRT_Client_PlatformVersion = 14 => PJRT_Client_PlatformVersion_Args {
        client: *mut PJRT_Client,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    PJRT_Client_Devices = 15 => PJRT_Client_Devices_Args {
        client: *mut PJRT_Client,
        devices: *const *mut PJRT_Device,
        num_devices: usize,
    }
    PJRT_Client_AddressableDevices = 16 => PJRT_Client_AddressableDevices_Args {
        client: *mut PJRT_Client,
        addressable_devices: *const *mut PJRT_Device,
        num_addressable_devices: usize,
    }
    PJRT_Client_Compile = 20 => PJRT_Client_Compile_Args {
        client: *mut PJRT_Client,
        program: *const PJRT_Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: *mut PJRT_LoadedExecutable,
    }
    PJRT_Client_BufferFromHostBuffer = 22 => PJRT_Client_BufferFromHostBuffer_Args {
        client: *mut PJRT_Client,
        data: *const c_void,
        r#type: i32,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: i32,
        device: *mut PJRT_Device,
        memory: *mut PJRT_Memory,
        device_layout: *mut PJRT_Buffer_MemoryLayout,
        done_with_host_buffer: *mut PJRT_Event,
        buffer: *mut PJRT_Buffer,
    }

    PJRT_DeviceDescription_Id = 23 => PJRT_DeviceDescription_Id_Args {
        device_description: *mut PJRT_DeviceDescription,
        id: i32,
    }
    PJRT_DeviceDescription_ProcessIndex = 24 => PJRT_DeviceDescription_ProcessIndex_Args {
        device_description: *mut PJRT_DeviceDescription,
        process_index: i32,
    }
    PJRT_DeviceDescription_Attributes = 25 => PJRT_DeviceDescription_Attributes_Args {
        device_description: *mut PJRT_DeviceDescription,
        num_attributes: usize,
        attributes: *const PJRT_NamedValue,
    }
    PJRT_DeviceDescription_Kind = 26 => PJRT_DeviceDescription_Kind_Args {
        device_description: *mut PJRT_DeviceDescription,
        device_kind: *const c_char,
        device_kind_size: usize,
    }

    PJRT_Device_GetDescription = 29 => PJRT_Device_GetDescription_Args {
        device: *mut PJRT_Device,
        device_description: *mut PJRT_DeviceDescription,
    }
    PJRT_Device_LocalHardwareId = 31 => PJRT_Device_LocalHardwareId_Args {
        device: *mut PJRT_Device,
        local_hardware_id: i32,
    }
    PJRT_Device_MemoryStats = 34 => PJRT_Device_MemoryStats_Args {
        device: *mut PJRT_Device,
        bytes_in_use: i64,
        peak_bytes_in_use: i64,
        peak_bytes_in_use_is_set: bool,
        num_allocs: i64,
        num_allocs_is_set: bool,
        largest_alloc_size: i64,
        largest_alloc_size_is_set: bool,
        bytes_limit: i64,
        bytes_limit_is_set: bool,
        bytes_reserved: i64,
        bytes_reserved_is_set: bool,
        peak_bytes_reserved: i64,
        peak_bytes_reserved_is_set: bool,
        bytes_reservable_limit: i64,
        bytes_reservable_limit_is_set: bool,
        largest_free_block_bytes: i64,
        largest_free_block_bytes_is_set: bool,
        pool_bytes: i64,
        pool_bytes_is_set: bool,
        peak_pool_bytes: i64,
        peak_pool_bytes_is_set: bool,
    }

    PJRT_Executable_Destroy = 40 => PJRT_Executable_Destroy_Args { executable: *mut PJRT_Executable }
    PJRT_Executable_Name = 41 => PJRT_Executable_Name_Args {
        executable: *mut PJRT_Executable,
        executable_name: *const c_char,
        executable_name_size: usize,
    }
    PJRT_Executable_NumReplicas = 42 => PJRT_Executable_NumReplicas_Args {
        executable: *mut PJRT_Executable,
        num_replicas: usize,
    }
    PJRT_Executable_NumPartitions = 43 => PJRT_Executable_NumPartitions_Args {
        executable: *mut PJRT_Executable,
        num_partitions: usize,
    }
    PJRT_Executable_NumOutputs = 44 => PJRT_Executable_NumOutputs_Args {
        executable: *mut PJRT_Executable,
        num_outputs: usize,
    }
    PJRT_Executable_SizeOfGeneratedCodeInBytes = 45 => PJRT_Executable_SizeOfGeneratedCodeInBytes_Args {
        executable: *mut PJRT_Executable,
        size_in_bytes: i64,
    }
    PJRT_Executable_GetCostAnalysis = 46 => PJRT_Executable_GetCostAnalysis_Args {
        executable: *mut PJRT_Executable,
        num_properties: usize,
        properties: *const PJRT_NamedValue,
    }
    PJRT_Executable_OptimizedProgram = 48 => PJRT_Executable_OptimizedProgram_Args {
        executable: *mut PJRT_Executable,
        program: *mut PJRT_Program,
    }
    PJRT_Executable_Serialize = 49 => PJRT_Executable_Serialize_Args {
        executable: *const PJRT_Executable,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_executable: *mut PJRT_SerializedExecutable,
        serialized_executable_deleter: Option<unsafe extern "C" fn(*mut PJRT_SerializedExecutable)>,
    }

    PJRT_LoadedExecutable_Destroy = 50 => PJRT_LoadedExecutable_Destroy_Args {
        executable: *mut PJRT_LoadedExecutable,
    }
    PJRT_LoadedExecutable_GetExecutable = 51 => PJRT_LoadedExecutable_GetExecutable_Args {
        loaded_executable: *mut PJRT_LoadedExecutable,
        executable: *mut PJRT_Executable,
    }
    PJRT_LoadedExecutable_AddressableDevices = 52 => PJRT_LoadedExecutable_AddressableDevices_Args {
        executable: *mut PJRT_LoadedExecutable,
        addressable_devices: *const *mut PJRT_Device,
        num_addressable_devices: usize,
    }
    PJRT_LoadedExecutable_Execute = 55 => PJRT_LoadedExecutable_Execute_Args {
        executable: *mut PJRT_LoadedExecutable,
        options: *mut PJRT_ExecuteOptions,
        argument_lists: *const *const *mut PJRT_Buffer,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut *mut PJRT_Buffer,
        device_complete_events: *mut *mut PJRT_Event,
        execute_device: *mut PJRT_Device,
    }
    PJRT_Executable_DeserializeAndLoad = 56 => PJRT_Executable_DeserializeAndLoad_Args {
        client: *mut PJRT_Client,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: *mut PJRT_LoadedExecutable,
        overridden_serialized_compile_options: *const c_char,
        overridden_serialized_compile_options_size: usize,
    }

    PJRT_Buffer_Destroy = 58 => PJRT_Buffer_Destroy_Args { buffer: *mut PJRT_Buffer }
    PJRT_Buffer_ElementType = 59 => PJRT_Buffer_ElementType_Args {
        buffer: *mut PJRT_Buffer,
        r#type: i32,
    }
    PJRT_Buffer_Dimensions = 60 => PJRT_Buffer_Dimensions_Args {
        buffer: *mut PJRT_Buffer,
        dims: *const i64,
        num_dims: usize,
    }
    PJRT_Buffer_OnDeviceSizeInBytes = 64 => PJRT_Buffer_OnDeviceSizeInBytes_Args {
        buffer: *mut PJRT_Buffer,
        on_device_size_in_bytes: usize,
    }
    PJRT_Buffer_Device = 65 => PJRT_Buffer_Device_Args {
        buffer: *mut PJRT_Buffer,
        device: *mut PJRT_Device,
    }
    PJRT_Buffer_Delete = 67 => PJRT_Buffer_Delete_Args { buffer: *mut PJRT_Buffer }
    PJRT_Buffer_IsDeleted = 68 => PJRT_Buffer_IsDeleted_Args {
        buffer: *mut PJRT_Buffer,
        is_deleted: bool,
    }
    PJRT_Buffer_CopyToDevice = 69 => PJRT_Buffer_CopyToDevice_Args {
        buffer: *mut PJRT_Buffer,
        dst_device: *mut PJRT_Device,
        dst_buffer: *mut PJRT_Buffer,
    }
    PJRT_Buffer_ToHostBuffer = 70 => PJRT_Buffer_ToHostBuffer_Args {
        src: *mut PJRT_Buffer,
        host_layout: *mut PJRT_Buffer_MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: *mut PJRT_Event,
    }
    PJRT_Buffer_ReadyEvent = 72 => PJRT_Buffer_ReadyEvent_Args {
        buffer: *mut PJRT_Buffer,
        event: *mut PJRT_Event,
    }

    PJRT_TopologyDescription_Create = 82 => PJRT_TopologyDescription_Create_Args {
        topology_name: *const c_char,
        topology_name_size: usize,
        create_options: *const PJRT_NamedValue,
        num_options: usize,
        topology: *mut PJRT_TopologyDescription,
    }
    PJRT_TopologyDescription_Destroy = 83 => PJRT_TopologyDescription_Destroy_Args {
        topology: *mut PJRT_TopologyDescription,
    }
    PJRT_TopologyDescription_PlatformName = 84 => PJRT_TopologyDescription_PlatformName_Args {
        topology: *const PJRT_TopologyDescription,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    PJRT_TopologyDescription_PlatformVersion = 85 => PJRT_TopologyDescription_PlatformVersion_Args {
        topology: *mut PJRT_TopologyDescription,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    PJRT_TopologyDescription_GetDeviceDescriptions = 86 => PJRT_TopologyDescription_GetDeviceDescriptions_Args {
        topology: *const PJRT_TopologyDescription,
        descriptions: *const *mut PJRT_DeviceDescription,
        num_descriptions: usize,
    }
    PJRT_TopologyDescription_Attributes = 88 => PJRT_TopologyDescription_Attributes_Args {
        topology: *mut PJRT_TopologyDescription,
        attributes: *const PJRT_NamedValue,
        num_attributes: usize,
    }

    PJRT_Compile = 89 => PJRT_Compile_Args {
        topology: *const PJRT_TopologyDescription,
        program: *const PJRT_Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        client: *mut PJRT_Client,
        executable: *mut PJRT_Executable,
    }

    PJRT_Executable_OutputElementTypes = 90 => PJRT_Executable_OutputElementTypes_Args {
        executable: *mut PJRT_Executable,
        output_types: *const i32,
        num_output_types: usize,
    }
    PJRT_Executable_OutputDimensions = 91 => PJRT_Executable_OutputDimensions_Args {
        executable: *mut PJRT_Executable,
        num_outputs: usize,
        dims: *const i64,
        dim_sizes: *const usize,
    }
    PJRT_Executable_Fingerprint = 94 => PJRT_Executable_Fingerprint_Args {
        executable: *mut PJRT_Executable,
        executable_fingerprint: *const c_char,
        executable_fingerprint_size: usize,
    }
    PJRT_Executable_GetCompiledMemoryStats = 96 => PJRT_Executable_GetCompiledMemoryStats_Args {
        executable: *mut PJRT_Executable,
        generated_code_size_in_bytes: i64,
        argument_size_in_bytes: i64,
        output_size_in_bytes: i64,
        alias_size_in_bytes: i64,
        temp_size_in_bytes: i64,
        host_generated_code_size_in_bytes: i64,
        host_argument_size_in_bytes: i64,
        host_output_size_in_bytes: i64,
        host_alias_size_in_bytes: i64,
        host_temp_size_in_bytes: i64,
        peak_memory_in_bytes: i64,
        total_size_in_bytes: i64,
    }
}

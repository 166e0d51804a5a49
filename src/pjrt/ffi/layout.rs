//! Holds the declarations of `types.rs` to the C header.
//!
//! The numbers below were printed by a C++ program that includes `xla/pjrt/c/pjrt_c_api.h` 0.90
//! (of the TensorFlow 2.21 wheel) and asks `offsetof`, `sizeof` and `..._STRUCT_SIZE`, on x86-64
//! Linux. AArch64 has the same type sizes and alignments.

use super::api::OLDEST_MINOR;
use super::types::{FUNCTIONS, *};

/// Function, index in the table, `STRUCT_SIZE`, `sizeof`, offsets of the fields after the head.
type FunctionLayout = (&'static str, usize, usize, usize, &'static [usize]);
/// Struct, `STRUCT_SIZE`, `sizeof`, offsets of the fields after the head.
type StructLayout = (&'static str, usize, usize, &'static [usize]);

#[rustfmt::skip]
const HEADER_FUNCTIONS: &[FunctionLayout] = &[
    ("PJRT_Error_Destroy", 0, 24, 24, &[16]),
    ("PJRT_Error_Message", 1, 40, 40, &[16, 24, 32]),
    ("PJRT_Error_GetCode", 2, 28, 32, &[16, 24]),
    ("PJRT_Plugin_Initialize", 3, 16, 16, &[]),
    ("PJRT_Plugin_Attributes", 4, 32, 32, &[16, 24]),
    ("PJRT_Event_Destroy", 5, 24, 24, &[16]),
    ("PJRT_Event_IsReady", 6, 25, 32, &[16, 24]),
    ("PJRT_Event_Await", 8, 24, 24, &[16]),
    ("PJRT_Event_OnReady", 9, 40, 40, &[16, 24, 32]),
    ("PJRT_Client_Create", 10, 88, 88, &[16, 24, 32, 40, 48, 56, 64, 72, 80]),
    ("PJRT_Client_Destroy", 11, 24, 24, &[16]),
    ("PJRT_Client_PlatformName", 12, 40, 40, &[16, 24, 32]),
    ("PJRT_Client_ProcessIndex", 13, 28, 32, &[16, 24]),
    ("PJRT_Client_PlatformVersion", 14, 40, 40, &[16, 24, 32]),
    ("PJRT_Client_Devices", 15, 40, 40, &[16, 24, 32]),
    ("PJRT_Client_AddressableDevices", 16, 40, 40, &[16, 24, 32]),
    ("PJRT_Client_Compile", 20, 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_Client_BufferFromHostBuffer", 22, 120, 120, &[16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112]),
    ("PJRT_DeviceDescription_Id", 23, 28, 32, &[16, 24]),
    ("PJRT_DeviceDescription_ProcessIndex", 24, 28, 32, &[16, 24]),
    ("PJRT_DeviceDescription_Attributes", 25, 40, 40, &[16, 24, 32]),
    ("PJRT_DeviceDescription_Kind", 26, 40, 40, &[16, 24, 32]),
    ("PJRT_Device_GetDescription", 29, 32, 32, &[16, 24]),
    ("PJRT_Device_LocalHardwareId", 31, 28, 32, &[16, 24]),
    ("PJRT_Device_MemoryStats", 34, 185, 192, &[16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184]),
    ("PJRT_Executable_Destroy", 40, 24, 24, &[16]),
    ("PJRT_Executable_Name", 41, 40, 40, &[16, 24, 32]),
    ("PJRT_Executable_NumReplicas", 42, 32, 32, &[16, 24]),
    ("PJRT_Executable_NumPartitions", 43, 32, 32, &[16, 24]),
    ("PJRT_Executable_NumOutputs", 44, 32, 32, &[16, 24]),
    ("PJRT_Executable_SizeOfGeneratedCodeInBytes", 45, 32, 32, &[16, 24]),
    ("PJRT_Executable_GetCostAnalysis", 46, 40, 40, &[16, 24, 32]),
    ("PJRT_Executable_OptimizedProgram", 48, 32, 32, &[16, 24]),
    ("PJRT_Executable_Serialize", 49, 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_LoadedExecutable_Destroy", 50, 24, 24, &[16]),
    ("PJRT_LoadedExecutable_GetExecutable", 51, 32, 32, &[16, 24]),
    ("PJRT_LoadedExecutable_AddressableDevices", 52, 40, 40, &[16, 24, 32]),
    ("PJRT_LoadedExecutable_Execute", 55, 80, 80, &[16, 24, 32, 40, 48, 56, 64, 72]),
    ("PJRT_Executable_DeserializeAndLoad", 56, 64, 64, &[16, 24, 32, 40, 48, 56]),
    ("PJRT_Buffer_Destroy", 58, 24, 24, &[16]),
    ("PJRT_Buffer_ElementType", 59, 28, 32, &[16, 24]),
    ("PJRT_Buffer_Dimensions", 60, 40, 40, &[16, 24, 32]),
    ("PJRT_Buffer_OnDeviceSizeInBytes", 64, 32, 32, &[16, 24]),
    ("PJRT_Buffer_Device", 65, 32, 32, &[16, 24]),
    ("PJRT_Buffer_Delete", 67, 24, 24, &[16]),
    ("PJRT_Buffer_IsDeleted", 68, 25, 32, &[16, 24]),
    ("PJRT_Buffer_CopyToDevice", 69, 40, 40, &[16, 24, 32]),
    ("PJRT_Buffer_ToHostBuffer", 70, 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_Buffer_ReadyEvent", 72, 32, 32, &[16, 24]),
    ("PJRT_TopologyDescription_Create", 82, 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_TopologyDescription_Destroy", 83, 24, 24, &[16]),
    ("PJRT_TopologyDescription_PlatformName", 84, 40, 40, &[16, 24, 32]),
    ("PJRT_TopologyDescription_PlatformVersion", 85, 40, 40, &[16, 24, 32]),
    ("PJRT_TopologyDescription_GetDeviceDescriptions", 86, 40, 40, &[16, 24, 32]),
    ("PJRT_TopologyDescription_Attributes", 88, 40, 40, &[16, 24, 32]),
    ("PJRT_Compile", 89, 64, 64, &[16, 24, 32, 40, 48, 56]),
    ("PJRT_Executable_OutputElementTypes", 90, 40, 40, &[16, 24, 32]),
    ("PJRT_Executable_OutputDimensions", 91, 48, 48, &[16, 24, 32, 40]),
    ("PJRT_Executable_Fingerprint", 94, 40, 40, &[16, 24, 32]),
    ("PJRT_Executable_GetCompiledMemoryStats", 96, 120, 120, &[16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112]),
];

#[rustfmt::skip]
const HEADER_STRUCTS: &[StructLayout] = &[
    ("PJRT_NamedValue", 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_Program", 48, 48, &[16, 24, 32, 40]),
    ("PJRT_Buffer_MemoryLayout_Tiled", 56, 56, &[16, 24, 32, 40, 48]),
    ("PJRT_ExecuteOptions", 112, 112, &[16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104]),
    ("PJRT_Buffer_MemoryLayout", 76, 80, &[16, 72]),
];

#[test]
fn argument_structs_have_the_layout_of_the_header() {
    assert_eq!(FUNCTIONS.len(), HEADER_FUNCTIONS.len());
    for (ours, header) in FUNCTIONS.iter().zip(HEADER_FUNCTIONS) {
        assert_eq!(ours, header);
    }
}

#[test]
fn shared_structs_have_the_layout_of_the_header() {
    let ours: &[StructLayout] = &[
        (
            "PJRT_NamedValue",
            PJRT_NamedValue::STRUCT_SIZE,
            size_of::<PJRT_NamedValue>(),
            PJRT_NamedValue::OFFSETS,
        ),
        (
            "PJRT_Program",
            PJRT_Program::STRUCT_SIZE,
            size_of::<PJRT_Program>(),
            PJRT_Program::OFFSETS,
        ),
        (
            "PJRT_Buffer_MemoryLayout_Tiled",
            PJRT_Buffer_MemoryLayout_Tiled::STRUCT_SIZE,
            size_of::<PJRT_Buffer_MemoryLayout_Tiled>(),
            PJRT_Buffer_MemoryLayout_Tiled::OFFSETS,
        ),
        (
            "PJRT_ExecuteOptions",
            PJRT_ExecuteOptions::STRUCT_SIZE,
            size_of::<PJRT_ExecuteOptions>(),
            PJRT_ExecuteOptions::OFFSETS,
        ),
        (
            "PJRT_Buffer_MemoryLayout",
            PJRT_Buffer_MemoryLayout::STRUCT_SIZE,
            size_of::<PJRT_Buffer_MemoryLayout>(),
            &[
                std::mem::offset_of!(PJRT_Buffer_MemoryLayout, tiled),
                std::mem::offset_of!(PJRT_Buffer_MemoryLayout, kind),
            ],
        ),
    ];
    assert_eq!(ours, HEADER_STRUCTS);
}

#[test]
fn the_function_pointers_start_where_the_header_has_them() {
    assert_eq!(size_of::<PJRT_Api_Head>(), 40);
    assert_eq!(std::mem::offset_of!(PJRT_Api_Head, version_struct_size), 16);
    assert_eq!(std::mem::offset_of!(PJRT_Api_Head, major_version), 32);
}

#[test]
fn no_function_is_newer_than_the_oldest_plugin_accepted() {
    // Everything up to `PJRT_Memory_Kind_Id` (index 97) is in the table since it was last put in
    // a new order, in 0.57.
    assert_eq!(OLDEST_MINOR, 57);
    for (name, index, ..) in FUNCTIONS {
        assert!(*index <= 97, "{name} came after 0.57");
    }
}

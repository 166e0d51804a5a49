// Errors, and the frame around every C function: argument checks, exceptions to errors.
#ifndef MAXDIFF_PLUGIN_STATUS_H_
#define MAXDIFF_PLUGIN_STATUS_H_

#include <cstddef>
#include <exception>
#include <new>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "xla/pjrt/c/pjrt_c_api.h"

struct PJRT_Error {
  absl::Status status;
};

namespace maxdiff {

inline PJRT_Error* ToError(absl::Status status) {
  return status.ok() ? nullptr : new PJRT_Error{std::move(status)};
}

// PJRT_Error_Code has the numbers of absl::StatusCode.
inline absl::Status MakeStatus(PJRT_Error_Code code, absl::string_view text) {
  return absl::Status(static_cast<absl::StatusCode>(code), text);
}

inline absl::Status CheckNotNull(const void* pointer, absl::string_view name) {
  if (pointer != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is null"));
}

// Runs `body` for the C function `name`. An argument struct shorter than the one this plugin was
// built with would be written past its end, so it is refused; no C++ exception leaves the plugin.
template <typename Args>
PJRT_Error* Call(const char* name, Args* args, size_t expected_size,
                 absl::Status (*body)(Args*)) {
  try {
    if (args == nullptr) {
      return ToError(absl::InvalidArgumentError(absl::StrCat(name, ": args is null")));
    }
    if (args->struct_size < expected_size) {
      return ToError(absl::InvalidArgumentError(absl::StrCat(
          name, "_Args: struct_size is ", args->struct_size, ", this plugin (PJRT C API ",
          PJRT_API_MAJOR, ".", PJRT_API_MINOR, ") expects at least ", expected_size)));
    }
    return ToError(body(args));
  } catch (const std::bad_alloc&) {
    return ToError(absl::ResourceExhaustedError(absl::StrCat(name, ": out of host memory")));
  } catch (const std::exception& error) {
    return ToError(absl::InternalError(absl::StrCat(name, ": ", error.what())));
  } catch (...) {
    return ToError(absl::InternalError(absl::StrCat(name, ": unknown C++ exception")));
  }
}

}  // namespace maxdiff

// Defines the C function `name`; the braces that follow are its body, which returns absl::Status
// and reads its argument struct as `args`.
#define MAXDIFF_PJRT_FUNCTION(name)                                              \
  absl::Status name##_Body(name##_Args* args);                                   \
  PJRT_Error* name(name##_Args* args) {                                          \
    return ::maxdiff::Call(#name, args, name##_Args_STRUCT_SIZE, &name##_Body);  \
  }                                                                              \
  absl::Status name##_Body(name##_Args* args)

#define MAXDIFF_CONCAT_INNER(a, b) a##b
#define MAXDIFF_CONCAT(a, b) MAXDIFF_CONCAT_INNER(a, b)

#define MAXDIFF_RETURN_IF_ERROR(expression)                         \
  do {                                                              \
    if (absl::Status status = (expression); !status.ok()) return status; \
  } while (false)

#define MAXDIFF_ASSIGN_OR_RETURN(target, expression) \
  MAXDIFF_ASSIGN_OR_RETURN_INNER(MAXDIFF_CONCAT(status_or_, __LINE__), target, expression)
#define MAXDIFF_ASSIGN_OR_RETURN_INNER(holder, target, expression) \
  auto holder = (expression);                                      \
  if (!holder.ok()) return std::move(holder).status();             \
  target = *std::move(holder)

#define MAXDIFF_CHECK_ARG(field) \
  MAXDIFF_RETURN_IF_ERROR(::maxdiff::CheckNotNull(args->field, #field))

#endif  // MAXDIFF_PLUGIN_STATUS_H_

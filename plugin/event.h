// PJRT_Error_* and PJRT_Event_*.
#ifndef MAXDIFF_PLUGIN_EVENT_H_
#define MAXDIFF_PLUGIN_EVENT_H_

#include "objects.h"

namespace maxdiff {

inline void PJRT_Error_Destroy(PJRT_Error_Destroy_Args* args) {
  if (args != nullptr) delete args->error;
}

inline void PJRT_Error_Message(PJRT_Error_Message_Args* args) {
  if (args == nullptr || args->error == nullptr) return;
  absl::string_view message = args->error->status.message();
  args->message = message.data();
  args->message_size = message.size();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Error_GetCode) {
  MAXDIFF_CHECK_ARG(error);
  args->code = static_cast<PJRT_Error_Code>(args->error->status.code());
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Event_Destroy) {
  delete args->event;
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Event_IsReady) {
  MAXDIFF_CHECK_ARG(event);
  args->is_ready = args->event->future.IsReady();
  return absl::OkStatus();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Event_Error) {
  MAXDIFF_CHECK_ARG(event);
  if (!args->event->future.IsReady()) {
    return absl::FailedPreconditionError("PJRT_Event_Error: the event is not ready yet");
  }
  return args->event->future.Await();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Event_Await) {
  MAXDIFF_CHECK_ARG(event);
  return args->event->future.Await();
}

MAXDIFF_PJRT_FUNCTION(PJRT_Event_OnReady) {
  MAXDIFF_CHECK_ARG(event);
  MAXDIFF_RETURN_IF_ERROR(
      CheckNotNull(reinterpret_cast<const void*>(args->callback), "callback"));
  args->event->future.OnReady([callback = args->callback, user_arg = args->user_arg](
                                  const absl::Status& status) {
    callback(ToError(status), user_arg);
  });
  return absl::OkStatus();
}

}  // namespace maxdiff

#endif  // MAXDIFF_PLUGIN_EVENT_H_

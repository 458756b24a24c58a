// Short notices at the bottom of the page, such as "Chat deleted" with Undo.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { IconButton } from "./IconButton";

interface Notice {
  text: string;
  /** Label and effect of the button. */
  action?: [label: string, run: () => void];
}

const SHOWN_MS = 12_000;

const notices = signal<readonly Notice[]>([]);

export function notify(text: string, action?: Notice["action"]): void {
  notices.value = [...notices.value, action ? { text, action } : { text }];
}

function close(notice: Notice): void {
  notices.value = notices.value.filter((one) => one !== notice);
}

/** All notices; once per page. */
export function Notices() {
  return (
    <div class="notices" role="status">
      {notices.value.map((one) => (
        <NoticeView key={one} notice={one} />
      ))}
    </div>
  );
}

/** One notice. It stays while the pointer or the focus is on it. */
function NoticeView({ notice }: { notice: Notice }) {
  const [isHeld, setHeld] = useState(false);
  useEffect(() => {
    if (isHeld) return;
    const timer = setTimeout(() => close(notice), SHOWN_MS);
    return () => clearTimeout(timer);
  }, [isHeld]);
  const { text, action } = notice;
  return (
    <div
      class="short-notice"
      onPointerEnter={() => setHeld(true)}
      onPointerLeave={() => setHeld(false)}
      onFocusIn={() => setHeld(true)}
      onFocusOut={() => setHeld(false)}
    >
      <span>{displayText(text)}</span>
      {action && (
        <button
          class="quiet"
          type="button"
          onClick={() => {
            close(notice);
            action[1]();
          }}
        >
          {action[0]}
        </button>
      )}
      <IconButton icon="close" label={labels.value.common.closeNotice} onClick={() => close(notice)} />
    </div>
  );
}

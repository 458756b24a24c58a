import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { labels } from "../text";
import { formatLength } from "../ui/format";
import { MAX_SECONDS, type Recording, startRecording } from "./recording";

interface Props {
  /** Called with the recording, or with null if it was canceled. */
  onDone: (sound: Blob | null) => void;
  onError: (message: string) => void;
}

/** Records sound from when it is shown until the user ends it. Escape cancels it. */
export function Recorder({ onDone, onError }: Props) {
  const t = labels.value.media;
  const [began, setBegan] = useState(0);
  const [seconds, setSeconds] = useState(0);
  const [ends, setEnds] = useState(false);
  const recording = useRef<Recording | null>(null);
  const button = useRef<HTMLButtonElement>(null);

  useEffect(() => {
    let isCurrent = true;
    startRecording().then(
      (found) => {
        if (!isCurrent) return found.cancel();
        recording.current = found;
        setBegan(performance.now());
      },
      (error: Error) => isCurrent && onError(error.message),
    );
    return () => {
      isCurrent = false;
      recording.current?.cancel();
    };
  }, []);
  useLayoutEffect(() => {
    if (!began) return;
    button.current?.focus();
    const timer = setInterval(() => setSeconds((performance.now() - began) / 1000), 200);
    return () => clearInterval(timer);
  }, [began]);
  useEffect(() => {
    if (seconds >= MAX_SECONDS && !ends) void finish();
  }, [seconds]);

  async function finish() {
    if (!recording.current || ends) return;
    setEnds(true);
    try {
      onDone(await recording.current.finish());
    } catch {
      onError(t.notConverted);
    }
  }

  return (
    <div
      class="recorder"
      role="group"
      aria-label={t.recording}
      onKeyDown={(event) => {
        if (event.key === "Escape") onDone(null);
      }}
    >
      <i aria-hidden="true" />
      {began ? (
        <>
          <span class="hidden" role="status">
            {t.recording}
          </span>
          <span role="timer">
            {t.recorded(formatLength(seconds), formatLength(MAX_SECONDS))}
          </span>
        </>
      ) : (
        <span role="status">{t.waitingForMicrophone}</span>
      )}
      <button ref={button} type="button" disabled={!began || ends} onClick={() => void finish()}>
        {t.done}
      </button>
      <button class="quiet" type="button" onClick={() => onDone(null)}>
        {labels.value.common.cancel}
      </button>
    </div>
  );
}

import { useEffect, useState } from "preact/hooks";
import { models, refreshProps } from "../api/server";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";

const SECOND_MS = 1000;

/** Progress before the first token, with the seconds since the request. */
export function Waiting({ progress, model }: { progress: number | undefined; model: string }) {
  const t = labels.value.chat;
  const seconds = useElapsedSeconds();
  const status = models.value.find((one) => one.id === model)?.status;
  const isLoading = progress === undefined && status !== undefined && status.value !== "loaded";
  useEffect(() => {
    if (isLoading) void refreshProps(); // how much of the model is loaded
  }, [isLoading, seconds]);
  const loaded = status?.progress?.value;
  return (
    <p class="waiting">
      <i class="pulse" aria-hidden="true" />
      <span role="status">
        {isLoading ? displayText(t.loadingModel(model, loaded === undefined ? null : Math.round(100 * loaded))) : progress === undefined || progress >= 1 ? t.waiting : t.processingPrompt}
      </span>
      {progress !== undefined && progress < 1 && (
        <>
          <progress value={progress} aria-label={t.processingPrompt} /> {Math.round(100 * progress)}%
        </>
      )}
      {seconds > 0 && <span aria-hidden="true">{t.seconds(seconds)}</span>}
    </p>
  );
}

function useElapsedSeconds(): number {
  const [seconds, setSeconds] = useState(0);
  useEffect(() => {
    const began = performance.now();
    const timer = setInterval(() => setSeconds(Math.floor((performance.now() - began) / SECOND_MS)), SECOND_MS / 4);
    return () => clearInterval(timer);
  }, []);
  return seconds;
}

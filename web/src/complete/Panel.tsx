import { modelFor } from "../api/server";
import { SettingsPanel } from "../chat/SettingsPanel";
import { Waiting } from "../chat/Waiting";
import { AnswerStats } from "../chat/AnswerStats";
import { NO_SETTINGS } from "../chat/settings";
import { labels } from "../text";
import { changeSettings, type Run, settings } from "./run";

export function Panel({ onClose }: { onClose: () => void }) {
  return (
    <SettingsPanel
      chat={false}
      settings={{ ...NO_SETTINGS, ...settings.value }}
      onChange={changeSettings}
      onClose={onClose}
    />
  );
}

/** Ending and statistics of the last continuation, or its error. */
export function Outcome({ of }: { of: Run }) {
  const found = of.latest.value;
  const wrong = of.failure.value;
  const refused = of.path === "infill" && wrong?.type === "not_supported_error";
  return (
    <>
      {wrong && (
        <p class="notice" role="alert">
          {refused
            ? labels.value.infill.notSupported
            : wrong.words}
        </p>
      )}
      {of.busy.value && !found?.text ? (
        <Waiting progress={undefined} model={modelFor(settings.value.model)} />
      ) : (
        <p class="ending" role="status">
          {found?.ending} {found?.stats && <AnswerStats stats={found.stats} />}
        </p>
      )}
    </>
  );
}

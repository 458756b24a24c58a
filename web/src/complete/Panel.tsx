import { SettingsPanel } from "../chat/SettingsPanel";
import { Took } from "../chat/Took";
import { NO_SETTINGS } from "../chat/settings";
import { changeSettings, type Run, settings } from "./running";

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

/** How the last continuation ended and what it took; why there is none. */
export function Outcome({ of }: { of: Run }) {
  const found = of.latest.value;
  const wrong = of.failure.value;
  const refused = of.path === "infill" && wrong?.type === "not_supported_error";
  return (
    <>
      {wrong && (
        <p class="notice" role="alert">
          {refused
            ? "This model has no tokens for infill: it was not trained to fill in between. Models for code, such as Qwen Coder, StarCoder or CodeGemma, have them."
            : wrong.words}
        </p>
      )}
      <p class="ending" role="status">
        {of.busy.value ? "…" : (found?.ending ?? "")} {found?.stats && <Took stats={found.stats} />}
      </p>
    </>
  );
}

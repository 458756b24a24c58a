import { useState } from "preact/hooks";
import { labels } from "../text";
import { useDraft } from "../ui/draft";
import { describe, formatValue, type Parameter, parseValue } from "./parameters";

interface Props {
  id: string;
  parameter: Parameter;
  value: unknown;
  onChange: (value: unknown) => void;
}

/** A field for the value of a parameter; empty for the server's default. */
export function ParameterField({ id, parameter, value, onChange }: Props) {
  const t = labels.value.settings;
  const [wrong, setWrong] = useState("");
  const { name, kind } = parameter;
  const description = describe(parameter);
  const usual = formatValue(parameter.default);
  const draft = useDraft(formatValue(value), (text) => {
    try {
      onChange(parseValue(parameter, text));
      setWrong("");
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
      return false;
    }
    return true;
  });
  return (
    <div class={`parameter ${value === undefined ? "" : "changed"}`}>
      <label for={id} title={description}>
        {name}
      </label>
      {kind === "boolean" ? (
        <select
          id={id}
          value={value === undefined ? "" : String(value)}
          onChange={(event) => onChange({ "": undefined, true: true, false: false }[event.currentTarget.value])}
        >
          <option value="">{usual ? t.defaultIs(usual) : t.default}</option>
          <option value="true">{t.true}</option>
          <option value="false">{t.false}</option>
        </select>
      ) : (
        <input
          id={id}
          type="text"
          spellcheck={false}
          autocomplete="off"
          inputMode={kind === "number" || kind === "integer" ? "decimal" : "text"}
          placeholder={usual || t.notSet}
          {...draft}
          aria-invalid={wrong !== ""}
          aria-describedby={`${id}-about`}
        />
      )}
      <small id={`${id}-about`}>{wrong || description}</small>
    </div>
  );
}
